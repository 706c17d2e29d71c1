"""Whether a relay can read a source or another relay, and over which transport. Pure; it knows no boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ckpt_engine.core.problems import CkptEngineError, precondition
from ckpt_engine.core.reach import same_host
from ckpt_engine.core.relay_remedy import name_of
from ckpt_engine.core.topology import Choice, choose_transport
from ckpt_engine.core.transports import transport_kinds
from ckpt_engine.v1.weights_pb2 import Host

Choose = Callable[[Host, str, Host, Sequence[str]], Choice]
"""As in core.plan."""


@dataclass(frozen=True)
class Origin:
    """A source that has the version."""

    name: str
    host: Host
    ways: tuple[frozenset[str], ...]  # the transports of each region, equal sets once; a reader needs one of each set


@dataclass(frozen=True)
class Station:
    """A relay."""

    name: str
    host: Host
    reads: tuple[str, ...]  # the transports with which it can read
    lends: frozenset[str]  # the transports over which it is read


class RelayReach:
    """How each relay reads each source and each other relay; looked up once."""

    def __init__(
        self, origins: Mapping[str, Origin], relays: Mapping[str, Station], choose: Choose | None = None
    ) -> None:
        self._origins, self._relays = origins, relays
        running = frozenset(relay.host.boot_id for relay in relays.values())
        self._choose = choose or partial(choose_transport, relays=running)
        self._edges: dict[tuple[str, str], Choice | CkptEngineError] = {}

    def reads(self, relay: str, other: str) -> bool:
        return not isinstance(self.edge(other, relay), CkptEngineError)

    def distance(self, lender: str, relay: str) -> int:
        edge = self.edge(lender, relay)
        return 0 if isinstance(edge, CkptEngineError) else edge.distance

    def edge(self, lender: str, relay: str) -> Choice | CkptEngineError:
        """How a relay reads a source or another relay: the worst of the best ways into its regions; or why not."""
        key = lender, relay
        if key not in self._edges:
            origin = self._origins.get(lender)
            host = self._relays[lender].host if origin is None else origin.host
            ways = (self._relays[lender].lends,) if origin is None else origin.ways
            self._edges[key] = self._worst_way(host, ways, self._relays[relay])
        return self._edges[key]

    def _worst_way(self, host: Host, ways: Iterable[frozenset[str]], relay: Station) -> Choice | CkptEngineError:
        reader = as_reader(relay.host, host)
        worst = Choice("", "it has nothing to read")
        for transports in ways:
            found: list[Choice] = []
            failures: list[str] = []
            for transport in sorted(transports, key=_preference):
                if transport not in relay.reads:
                    failures.append(
                        f"{relay.name} cannot read over {transport} (it can over {', '.join(relay.reads) or 'none'}); "
                        f"run `ckpt-engine doctor` on host {name_of(relay.host)} to see why"
                    )
                    continue
                try:
                    found.append(self._choose(host, transport, reader, relay.reads))
                except CkptEngineError as error:
                    failures.append(error.problem.message)
            if failures and not found:
                return precondition("; and ".join(dict.fromkeys(failures)))
            best = min(found, key=lambda choice: choice.distance, default=worst)
            worst = max(worst, best, key=lambda choice: choice.distance)
        return worst


def _preference(transport: str) -> tuple[int, str]:
    """The sort key of transports: of equally near ways planners and readers take the first."""
    kinds = list(transport_kinds())
    return kinds.index(transport) if transport in kinds else len(kinds), transport


def as_reader(relay: Host, source: Host) -> Host:
    """A relay's host as it reads this source: on its own host it uses the GPUs that the weights lie on."""
    if not source.gpus or not same_host(relay, source):
        return relay
    found = Host()
    found.CopyFrom(relay)
    del found.gpus[:]
    found.gpus.extend(source.gpus)
    return found
