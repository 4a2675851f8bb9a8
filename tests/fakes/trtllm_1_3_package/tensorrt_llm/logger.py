from fake_base import Logger

logger = Logger()
