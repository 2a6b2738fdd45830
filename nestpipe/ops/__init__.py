"""Operations of the models: each has a plain reference and a form that needs less memory or time."""
