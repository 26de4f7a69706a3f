"""The demo: a real pretrained model, passages of invented facts, and ``kvspan demo`` itself."""
