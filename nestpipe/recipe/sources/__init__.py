"""Sources of data, one file each. A new file here that registers its class adds a value of data.kind."""
