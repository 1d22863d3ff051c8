"""What a tool says of a claim."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a claim held; None where it could not be judged. One that is `required` fails the whole."""

    claim: str
    ok: bool | None
    detail: str
    required: bool = False

    @property
    def mark(self) -> str:
        """One word."""
        return {True: "ok", False: "FAILED", None: "not judged"}[self.ok]

    @property
    def style(self) -> str:
        """How rich shows that word."""
        return {True: "green", False: "bold red", None: "yellow"}[self.ok]


def hold(verdicts: list[Verdict]) -> bool:
    """Whether no required verdict failed."""
    return all(verdict.ok is not False for verdict in verdicts if verdict.required)
