"""The runs of `generate`, `speak`, `animate` and `answer`, which import torch."""
