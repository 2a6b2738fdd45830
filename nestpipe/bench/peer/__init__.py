"""`bench peer`: TorchRec and nestpipe on the same work, in turns."""
