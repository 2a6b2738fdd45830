"""`bench monitor`: whether `nestpipe monitor` names what was made slow."""
