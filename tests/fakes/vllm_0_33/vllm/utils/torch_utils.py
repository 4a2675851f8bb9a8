class LayerName:
    """Stands for a layer's name in compiled graphs, where a string would be a constant."""

    def __init__(self, value: str):
        self.value = value


LayerNameType = LayerName | str


def _encode_layer_name(layer_name: str) -> LayerName:
    return LayerName(layer_name)


def _resolve_layer_name(layer_name) -> str:
    return layer_name.value if isinstance(layer_name, LayerName) else layer_name
