from fake_base import PackageMetadata


class DSAtrtllmAttentionMetadata(PackageMetadata):
    def prepare(self):
        super().prepare()
