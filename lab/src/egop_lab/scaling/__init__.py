"""Memory, communication and matrix products that each optimizer needs for a model, computed from shapes alone.

``models`` builds known models on the meta device, ``costs`` counts what each weight takes and compares methods.
"""
