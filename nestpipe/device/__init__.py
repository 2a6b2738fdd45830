"""An accelerator's streams, and the memory that passes to and from it."""
