"""Operations of the dense models: for each a plain reference, and a form that needs less memory or time."""
