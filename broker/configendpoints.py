"""The endpoints of all pools: each by itself, and what holds between them (ids unique, a server counts once)."""

from __future__ import annotations

from broker.addresses import endpoint_url, server_key
from broker.configfile import Findings, Node
from broker.configmodel import Endpoint
from broker.configreader import Section
from broker.errors import InvalidTask
from broker.quoting import scheme_hint
from broker.task import FORBIDDEN_HEADERS, HEADER_NAME, check_header_value, check_names

ENDPOINT = (
    "id", "url", "priority", "max_concurrent", "auto_min", "auto_max", "capabilities", "labels", "enabled",
    "api_key", "api_key_file", "hmac_secret", "hmac_secret_file", "headers",
)  # fmt: skip
MAX_SLOTS = 65_535
_DEFAULT = Endpoint(id="", url="")
_CREDENTIAL_HEADERS = frozenset({"authorization", "cookie"})


class EndpointReader:
    """Remembers what it has read, so that later endpoints are judged against earlier ones, over all pools."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.by_id: dict[str, Node] = {}
        self.by_server: dict[str, tuple[str, str]] = {}  # server key: (pool, endpoint id)

    def read(self, pool: str, section: Section) -> tuple[Endpoint, ...]:
        node = section.get("endpoints")
        if node is None:
            return ()
        if not isinstance(node.value, list):
            self.findings.problem(node, f"must be a list of endpoints, not {node.kind()}")
            return ()
        kept: list[Endpoint] = []
        for item in node.value:
            if not isinstance(item.value, dict):
                self.findings.problem(item, f"must be a mapping with id and url, not {item.kind()}")
            else:
                one = Section(item, ENDPOINT, self.findings, section.base)
                endpoint = _endpoint(one)
                self._claim_id(endpoint, one)
                if self._is_new(endpoint, pool, one):
                    kept.append(endpoint)
        return tuple(kept)

    def _claim_id(self, endpoint: Endpoint, section: Section) -> None:
        first = self.by_id.get(endpoint.id)
        if endpoint.id and first is not None:
            section.problem("id", f"{endpoint.id!r} is already the id of {first.key} ({first.where()}); ids are unique")
        elif endpoint.id:
            self.by_id[endpoint.id] = section.node

    def _is_new(self, endpoint: Endpoint, pool: str, section: Section) -> bool:
        if not endpoint.url or not endpoint.enabled:
            return True
        key = server_key(endpoint.url)
        first_pool, first_id = self.by_server.setdefault(key, (pool, endpoint.id))
        if first_pool != pool:
            message = f"pool {first_pool!r} uses the same server; each pool counts slots by itself"
            self.findings.warn(section.entries["url"], message)
        elif (first_pool, first_id) != (pool, endpoint.id):
            message = f"the same server as endpoint {first_id!r}: it counts once, {endpoint.id!r} is left out"
            self.findings.warn(section.entries["url"], message)
            return False
        return True


def _endpoint(section: Section) -> Endpoint:
    headers = read_headers(section, credentials=True)
    api_key = section.secret("api_key")
    least = section.whole("auto_min", _DEFAULT.auto_min, 1, MAX_SLOTS)
    most = section.whole("auto_max", max(_DEFAULT.auto_max, least), 1, MAX_SLOTS)
    if most < least:
        section.problem("auto_max", f"is less than auto_min ({least})")
    if api_key is not None and "authorization" in headers:
        section.problem("headers", "Authorization is given although api_key is; keep one")
    return Endpoint(
        id=_name(section),
        url=_address(section),
        priority=section.whole("priority", _DEFAULT.priority, 1, 10, also=" (10 is preferred)"),
        max_concurrent=section.whole_or_auto("max_concurrent", _DEFAULT.max_concurrent, MAX_SLOTS),
        auto_min=least,
        auto_max=most,
        capabilities=section.names("capabilities"),
        labels=_labels(section),
        enabled=section.flag("enabled", True),
        api_key=api_key,
        hmac_secret=section.secret("hmac_secret"),
        headers=headers,
    )


def _name(section: Section) -> str:
    name = section.identifier("id")
    if name is None:
        if not section.given("id"):
            section.problem("id", "is missing; every endpoint needs one")
        return ""
    try:
        return check_names("id", [name])[0]
    except InvalidTask:
        section.problem("id", f"must be 1 to 64 letters, digits, '_' or '-', not {section.entries['id'].show()}")
        return ""


def _address(section: Section) -> str:
    node = section.get("url")
    if node is None:
        if not section.given("url"):
            section.problem("url", "is missing; write http://host:port or https://host")
        return ""
    try:
        return endpoint_url(node.value) if isinstance(node.value, str) else endpoint_url("")
    except ValueError as error:
        section.findings.problem(node, f"{error}, not {node.show()}{scheme_hint(node.raw, 'http')}")
        return ""


def _labels(section: Section) -> dict[str, str]:
    node = section.get("labels")
    if node is None:
        return {}
    if not isinstance(node.value, dict):
        section.findings.problem(node, f"must be a mapping of names to text, not {node.kind()}")
        return {}
    found: dict[str, str] = {}
    for name, child in node.value.items():
        if isinstance(child.value, (dict, list)):
            section.findings.problem(child, f"must be text, not {child.kind()}")
        elif child.value is not None:
            found[name] = child.value if isinstance(child.value, str) else child.raw
    return found


def read_headers(section: Section, credentials: bool = False) -> dict[str, str]:
    """The mapping `headers`, names lower-cased. Problems name the header, never its value.

    Headers of the connection are refused; Authorization and Cookie too, unless `credentials`.
    """
    node = section.get("headers")
    if node is None:
        return {}
    if not isinstance(node.value, dict):
        section.findings.problem(node, f"must be a mapping of names to text, not {node.kind()}")
        return {}
    checked: dict[str, str] = {}
    for name, child in node.value.items():
        lowered = name.lower()
        allowed = credentials and lowered in _CREDENTIAL_HEADERS
        if not allowed and (lowered in FORBIDDEN_HEADERS or lowered.startswith("proxy-")):
            section.findings.problem(child, "cannot be set here: it belongs to the connection")
        elif not HEADER_NAME.fullmatch(name):
            hint = ": a space belongs behind the colon" if ":" in name else ""
            section.findings.problem(child, f"not a valid HTTP header name{hint}")
        elif lowered in checked:
            section.findings.problem(child, "given twice (the case of a header's name does not matter)")
        else:
            checked[lowered] = _header_value(section.findings, child, name)
    return checked


def _header_value(findings: Findings, node: Node, name: str) -> str:
    if not node.broken and isinstance(node.value, (dict, list)):
        findings.problem(node, "must be text")
        return ""
    try:
        value = node.value if isinstance(node.value, str) else node.raw
        return check_header_value(name, value)
    except InvalidTask:
        findings.problem(node, "must be printable ASCII without CR or LF")
        return ""
