"""Classifies the pieces of Tetris with an equivariant network of e3nn-jax, as its example does."""

import e3nn_jax as e3nn
import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph
import optax

PIECES = [
    [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 1, 0]],
    [[1, 1, 1], [1, 1, 2], [2, 1, 1], [2, 0, 1]],
    [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]],
    [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 3]],
    [[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]],
    [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0]],
    [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 1]],
    [[0, 0, 0], [1, 0, 0], [1, 1, 0], [2, 1, 0]],
]


def tetris():
    graphs = []
    for piece in PIECES:
        pos = jnp.array(piece, dtype=jnp.float32)
        senders, receivers = e3nn.radius_graph(pos, 1.1)
        graphs.append(
            jraph.GraphsTuple(
                nodes=pos,
                edges=None,
                globals=None,
                senders=senders,
                receivers=receivers,
                n_node=jnp.array([len(pos)]),
                n_edge=jnp.array([len(senders)]),
            )
        )
    return jraph.batch(graphs), jnp.arange(len(PIECES))


class Layer(nn.Module):
    target_irreps: e3nn.Irreps
    sh_lmax: int = 2

    @nn.compact
    def __call__(self, graphs, positions):
        target = e3nn.Irreps(self.target_irreps)

        def update_edge_fn(edge_features, sender_features, receiver_features, globals):
            sh = e3nn.spherical_harmonics(
                list(range(1, self.sh_lmax + 1)),
                positions[graphs.receivers] - positions[graphs.senders],
                True,
            )
            return e3nn.concatenate(
                [sender_features, e3nn.tensor_product(sender_features, sh)]
            ).regroup()

        def update_node_fn(node_features, sender_features, receiver_features, globals):
            node_feats = receiver_features / 1.5
            node_feats = e3nn.flax.Linear(target, name="linear_pre")(node_feats)
            node_feats = e3nn.scalar_activation(node_feats)
            node_feats = e3nn.flax.Linear(target, name="linear_post")(node_feats)
            shortcut = e3nn.flax.Linear(node_feats.irreps, name="shortcut", force_irreps_out=True)(
                node_features
            )
            return shortcut + node_feats

        return jraph.GraphNetwork(update_edge_fn, update_node_fn)(graphs)


class Model(nn.Module):
    @nn.compact
    def __call__(self, graphs):
        positions = e3nn.IrrepsArray("1o", graphs.nodes)
        ones = e3nn.IrrepsArray("0e", jnp.ones((len(positions.array), 1)))
        graphs = graphs._replace(nodes=ones)
        for irreps in 2 * ["32x0e + 32x0o + 4x1o + 4x1e"] + ["0o + 7x0e"]:
            graphs = Layer(irreps)(graphs, positions)
        logits = e3nn.scatter_sum(graphs.nodes, nel=graphs.n_node)
        odd, even1, even2 = logits.array[:, :1], logits.array[:, 1:2], logits.array[:, 2:]
        return jnp.concatenate([odd * even1, -odd * even1, even2], axis=1)


model = Model()
opt = optax.adam(learning_rate=0.01)


def loss_fn(params, graphs, labels):
    logits = model.apply(params, graphs)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(loss), logits


@jax.jit
def update_fn(params, opt_state, graphs, labels):
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(params, graphs, labels)
    accuracy = jnp.mean(jnp.argmax(logits, axis=1) == labels)
    updates, opt_state = opt.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss, accuracy


graphs, labels = tetris()
params = jax.jit(model.init)(jax.random.key(3), graphs)
opt_state = opt.init(params)
for step in range(1, 11):
    params, opt_state, loss, accuracy = update_fn(params, opt_state, graphs, labels)
    print(f"step {step} loss {loss} accuracy {accuracy}")
