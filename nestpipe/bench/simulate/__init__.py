"""`bench simulate`: how far predictions of the simulator are from what was measured, and from published figures."""
