"""`bench prepare`: time and memory of `nestpipe data prepare`, and what is left of killed runs."""
