"""The machine of a member that holds sealed versions and is not a trainer rank: a relay, a directory's keeper.

The manager treats all kinds of holders alike. Everything that the machine decides is in `offering`.
"""

from __future__ import annotations

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.machines.offering import HelloState, MemberKind, OfferingMachine
from ckpt_engine.v1 import manager_pb2, weights_pb2


class HolderMachine(OfferingMachine):
    """One holder. Its tables have no rank, and the id that `offers.holder_id` gives.

    kind, name: what it is, and which one of its kind. session_id: of this process; survives reconnects. filling: what
    it can be filled with, read for each hello; None: it cannot be filled.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        session_id: str,
        host: weights_pb2.Host,
        deadlines: Deadlines | None = None,
        filling: manager_pb2.Filling | None = None,
    ) -> None:
        def hello(state: HelloState) -> manager_pb2.HolderHello:
            return manager_pb2.HolderHello(
                cluster=state.cluster,
                kind=kind,
                name=name,
                session_id=session_id,
                host=host,
                epoch=state.epoch,
                held=state.held,
                filling=filling,
                digest_format=DIGEST_FORMAT,
            )

        super().__init__(MemberKind("HolderSession", manager_pb2.HolderMessage, hello, hello), deadlines)
