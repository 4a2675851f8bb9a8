from fake_base import DraftMetadata


class DSAtrtllmAttentionMetadata(DraftMetadata):
    def prepare(self):
        super().prepare()
