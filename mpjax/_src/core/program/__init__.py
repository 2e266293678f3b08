"""Functions traced to programs: arguments, results and gradients as flat lists of arrays."""
