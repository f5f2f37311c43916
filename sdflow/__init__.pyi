from sdflow.runtime.files.image_text_reading import read_image_settings as read_image_settings
from sdflow.runtime.pipeline import Pipeline as Pipeline

__version__: str
