"""What configs call the sizes and constants of a layer's parts, and how they are read, as transformers reads them."""
