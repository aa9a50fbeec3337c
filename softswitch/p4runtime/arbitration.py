"""Client arbitration: the primary controller of each role (P4Runtime specification, section 5).

No locks and no I/O: the service calls it from one thread at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from finsy.proto import U128, p4r, rpc_code

from softswitch.p4runtime.fieldcodecs import invalid
from softswitch.program.state import StatusError

MAX_ROLE_NAME = 256
"""Characters of a role's name."""
MAX_EMPTY_ROLES = 32
"""Roles without controllers whose highest election id is remembered."""


class Client(ABC):
    """A controller's stream; role and election id are set by arbitration."""

    role: str | None = None
    election_id: int | None = None

    @abstractmethod
    def send(self, message: p4r.StreamMessageResponse) -> None:
        """Queue a message for the controller."""


@dataclass(slots=True)
class ArbitratedRole:
    """The controllers of one role; `highest` is the highest election id so far."""

    name: str
    live: list[Client] = field(default_factory=list)
    primary: Client | None = None
    highest: int | None = None


class Arbitration:
    """The roles of one device. The default role "" always exists; every role has the whole pipeline."""

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id
        self.roles = {"": ArbitratedRole("")}

    def update(self, controller: Client, message: p4r.MasterArbitrationUpdate) -> Client | None:
        """Handle a controller's arbitration message, and notify all controllers but a new primary.

        Returns:
            A new primary, to be notified (`notify`) after the previous primary's writes.

        Raises:
            StatusError: The status with which its stream ends.
        """
        election_id = U128.decode(message.election_id) if message.HasField("election_id") else None
        role = self._admit(controller, message, election_id)
        was_primary = role.primary is controller
        controller.election_id = election_id
        if election_id is not None and (role.highest is None or election_id >= role.highest):
            role.highest = election_id
            role.primary = controller
            for client in role.live:
                if client is not controller:
                    self.notify(client)
            return controller
        if was_primary:
            role.primary = None
            for client in role.live:
                self.notify(client)
        else:
            self.notify(controller)
        return None

    def _admit(
        self, controller: Client, message: p4r.MasterArbitrationUpdate, election_id: int | None
    ) -> ArbitratedRole:
        if controller.role is None:
            self.check_device(message.device_id)
        elif message.device_id != self.device_id or message.role.name != controller.role:
            raise StatusError(
                "FAILED_PRECONDITION",
                f'this stream is for device {self.device_id}, role "{controller.role}": '
                "use a separate stream for each",
            )
        if message.role.HasField("config"):
            raise invalid("role.config is not supported: every role has the whole pipeline")
        if len(message.role.name) > MAX_ROLE_NAME:
            raise invalid(f"a role's name has at most {MAX_ROLE_NAME} characters")
        role = self.roles.get(message.role.name) or ArbitratedRole(message.role.name)
        if election_id is not None and any(
            client.election_id == election_id for client in role.live if client is not controller
        ):
            raise invalid(f"election id {election_id} is already used by another controller of this role")
        if controller.role is None:
            controller.role = role.name
            role.live.append(controller)
            self.roles[role.name] = role
        return role

    def leave(self, controller: Client) -> None:
        """Remove a controller whose stream ended; notify the others, but promote none."""
        if controller.role is None:
            return
        role = self.roles[controller.role]
        role.live.remove(controller)
        if role.primary is controller:
            role.primary = None
            for client in role.live:
                self.notify(client)
        if role.name and not role.live:
            self.roles[role.name] = self.roles.pop(role.name)  # the last to be forgotten
            empty = [name for name, role in self.roles.items() if name and not role.live]
            for name in empty[:-MAX_EMPTY_ROLES]:
                del self.roles[name]

    def notify(self, controller: Client) -> None:
        """Notify a controller of the state of its role (specification, section 5.4)."""
        assert controller.role is not None
        role = self.roles[controller.role]
        update = p4r.MasterArbitrationUpdate(device_id=self.device_id)
        if role.name:
            update.role.name = role.name
        if role.highest is not None:
            update.election_id.CopyFrom(U128.encode(role.highest))
        status = update.status
        if role.primary is controller:
            status.code, status.message = rpc_code.OK, "you are primary"
        elif role.primary is not None:
            status.code, status.message = rpc_code.ALREADY_EXISTS, "another controller is primary"
        else:
            status.code, status.message = rpc_code.NOT_FOUND, "no controller is primary"
        controller.send(p4r.StreamMessageResponse(arbitration=update))

    def check_device(self, device_id: int) -> None:
        """Raise `StatusError` NOT_FOUND for another device."""
        if device_id != self.device_id:
            raise StatusError("NOT_FOUND", f"unknown device {device_id}; this is device {self.device_id}")

    def check_primary(self, role_name: str, election_id: p4r.Uint128 | None) -> None:
        """Raise `StatusError` unless this is the election id of the role's primary."""
        role = self.roles.get(role_name)
        if role is None:
            raise StatusError("NOT_FOUND", f'no controller has the role "{role_name}"')
        primary = role.primary
        if primary is None or election_id is None or U128.decode(election_id) != primary.election_id:
            raise StatusError(
                "PERMISSION_DENIED",
                "only the primary may write"
                + ("; there is none" if primary is None else f": its election id is {primary.election_id}"),
            )

    def is_primary(self, controller: Client) -> bool:
        """Return whether a controller is its role's primary."""
        return controller.role is not None and self.roles[controller.role].primary is controller
