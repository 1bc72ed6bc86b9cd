"""The request router that Ray Serve runs in each gateway: Ray's interface around prefix.Policy."""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from .prefix import Policy, Ticket, register


class Router(RequestRouter):
    """Chooses the replica of a request by its Ticket, the first argument of the call."""

    policy: Policy
    slots: int

    def initialize_state(self, slots: int, entries: int, spread: float, prefix: bool) -> None:
        """Create the policy. Ray calls this with the arguments in the configuration of the deployment."""
        self.policy, self.slots = Policy(entries, spread, prefix), slots
        register(self._deployment_id.name, self)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, then the others in case that it is full."""
        arguments = pending_request.args if pending_request else ()
        ticket = arguments[0] if arguments and isinstance(arguments[0], Ticket) else Ticket()
        cache = self.replica_queue_len_cache
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: cache.get(replica.replica_id) or 0 for name, replica in replicas.items()}
        chosen = self.policy.choose(ticket, loads, self.slots)
        if chosen is None:  # The request has failed on all of them.
            return []
        others = [replica for name, replica in replicas.items() if name != chosen and name not in ticket.avoid]
        return [[replicas[chosen]], others]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Use these replicas from now on."""
        left = self._replica_id_set - {replica.replica_id for replica in replicas}
        super().update_replicas(replicas)
        for replica_id in left:
            self.policy.remove(replica_id.unique_id)

    def on_replica_actor_died(self, replica_id) -> None:
        """Forget a replica whose process has died."""
        super().on_replica_actor_died(replica_id)
        self.policy.remove(replica_id.unique_id)
