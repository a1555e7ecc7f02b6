"""Graph passes: each a pure function from one ONNX graph to the next."""
