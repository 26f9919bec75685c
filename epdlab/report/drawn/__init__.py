"""The figures drawn from code and results: one module per figure, each with a function that gives its SVG."""
