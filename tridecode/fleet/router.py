"""Extensions of Ray Serve: the request router in each gateway, and the autoscaling policy in its controller.

Ray copies this module by value. Therefore it contains no state, and imports little.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from . import upstream


class Router(RequestRouter):
    """Stores the replicas of its deployment for the gateway, which chooses among them."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Store the replicas that are ready. Ray calls this when they change."""
        super().update_replicas(replicas)
        facts = {each.replica_id.unique_id: dict(each.replica_metadata) for each in replicas}
        upstream.set_replicas(self._deployment_id.name, facts)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return all replicas. A gateway calls one through Ray only when it starts."""
        return [candidate_replicas]


def replicas_needed(context: Any) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas with which each has the target number of requests."""
    requests = context.aggregated_metrics.get("requests", {})
    return sum(requests.values()) / context.config.get_target_ongoing_requests(), {}
