class Scheduler:
    def _preempt_request(self, request, timestamp: float, drop_stale_output: bool = False) -> None:
        request.num_preemptions += 1
