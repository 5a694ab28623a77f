"""How long ranks that survive a fault take to be in the training function again, in their processes."""
