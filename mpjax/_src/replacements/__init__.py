"""What a policy replaces in the program that it is given: attentions, and losses of logits.

It is loaded only if a policy asks for it. `programs.replaced` is the entry.
"""
