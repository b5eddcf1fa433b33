"""The group itself and its face towards torch.distributed."""
