"""Weights as safetensors, one model for all: what Hugging Face's libraries read and write."""

from polyshard_checkpoint.safetensors.model import load_safetensors, save_safetensors
from polyshard_checkpoint.safetensors.reading import SafetensorsReader
from polyshard_checkpoint.safetensors.writing import SafetensorsWriter

__all__ = ["SafetensorsReader", "SafetensorsWriter", "load_safetensors", "save_safetensors"]
