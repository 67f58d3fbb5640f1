"""The ACL rules that docs/security.md gives for each role, read from there: what is documented is what is tested."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.servers import RealServer

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "security.md"
_RULE = re.compile(r"^ACL SETUSER (\S+) (.+)$", re.MULTILINE)
PASSWORD = "PASSWORD"


def documented_rules() -> dict[str, str]:
    """Rules by role. A rule goes on behind a backslash at the end of its line."""
    text = DOCUMENT.read_text(encoding="utf-8").replace("\\\n", " ")
    return {name: " ".join(rules.split()) for name, rules in _RULE.findall(text)}


def set_users(server: RealServer) -> dict[str, str]:
    """Makes the users of the document on a server; the URL of each. The default user stays, for the test."""
    urls = {}
    for name, rules in documented_rules().items():
        if name == "default":
            continue
        reply = server.command("ACL", "SETUSER", name, *rules.replace(PASSWORD, f"pw-{name}").split())
        assert reply == b"OK", (name, reply)
        urls[name] = server.url.replace("://", f"://{name}:pw-{name}@")
    return urls
