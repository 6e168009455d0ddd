"""Models of transformers from and to their folders, each rank its own bytes."""

from polyshard_checkpoint.pretrained.loading import load_pretrained
from polyshard_checkpoint.pretrained.saving import save_pretrained

__all__ = ["load_pretrained", "save_pretrained"]
