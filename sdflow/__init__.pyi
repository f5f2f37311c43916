from sdflow.runtime.pipeline import Pipeline as Pipeline

__version__: str
