class Logger:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def info(self, *message) -> None:
        self.lines.append(("info", " ".join(map(str, message))))

    def warning(self, *message) -> None:
        self.lines.append(("warning", " ".join(map(str, message))))


logger = Logger()
