"""Published data sets: their files, made by hand or downloaded, to prepared folders."""
