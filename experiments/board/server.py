"""The board's web server: checks requests and answers them from the results.

It serves on loopback without a login. Other pages in the same browser must not be able to read it: hosts are checked (a
foreign name that resolves to 127.0.0.1 is refused), answers are not shared between origins, and only GET reads results.
Names, messages and paths from results are untrusted: pages get them as JSON and show them as text.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import platform
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from fedloom.experiments.board import views
from fedloom.experiments.board.index import UNREADABLE, Index, Stamps, stamps_of, to_json
from fedloom.experiments.store.ablations import FOLDER, ablation_ids
from fedloom.platform.results.files import read_file, stamp_of
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.words import said, shown

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {file.name for file in STATIC.iterdir() if file.suffix in TYPES}
OPEN = {"/board.css", "/icon.svg", "/login.html", "/login"}
"""The paths served without the token: those of the page that asks for it."""
LEAST_TOKEN = 16
MOST_RUNS = 200
"""Maximum number of runs in one view."""
REFRESH_S = 1.0
"""Minimum time between two refreshes of the index, however many pages are open."""
COOKIE = "fedloom_board"
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
REPORT_POLICY = "sandbox; default-src 'none'; img-src data:; style-src 'unsafe-inline'; frame-ancestors 'none'"
"""Reports need no scripts, so that none may run in one that a stranger put into the results."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Content-Security-Policy": PAGE_POLICY,
}


def check_address(host: str, token: str) -> None:
    """Raises ValueError for a host that other machines can reach without a token, and for a token that is too short."""
    if token and len(token) < LEAST_TOKEN:
        raise ValueError(f"the token has {len(token)} characters: give at least {LEAST_TOKEN}")
    if not token and not is_loopback(host):
        raise ValueError(
            f"--host {shown(host)} is reached from other machines: give FEDLOOM_BOARD_TOKEN (or --token) a secret of "
            f"at least {LEAST_TOKEN} characters, or leave --host out and forward the port with ssh -L"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host; the only accepted name is `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Board:
    """The application: an index of the results and a reader of their tables behind a few routes."""

    def __init__(self, results: Path, host: str, token: str = "") -> None:
        check_address(host, token)
        self.index, self.reader = Index(results), views.Reader()
        self._host, self._token = host, token.encode()
        self._names = () if is_loopback(host) else (platform.node().lower(), socket.getfqdn().lower())
        self._refreshing = asyncio.Lock()
        self.refresh_s = REFRESH_S
        self._next_refresh_s = 0.0
        self.app = web.Application(middlewares=[self._guard], client_max_size=4096)
        self.app.add_routes(
            [
                web.get("/", partial(self._file, name="index.html")),
                *(web.get(f"/{name}", partial(self._file, name=name)) for name in sorted(FILES)),
                web.get("/api/runs", self._runs),
                web.get("/api/labels", self._of_runs(views.labels, "runs")),
                web.get("/api/metrics", self._of_runs(views.metrics, "rounds", "evaluations")),
                web.get("/api/curves", self._curves),
                web.get("/api/differences", self._of_runs(views.differences, "runs")),
                web.get("/api/run", self._of_run(views.facts, "runs", "rounds")),
                web.get("/api/clients", self._clients),
                web.get("/api/fronts", self._of_run(views.fronts, "candidates")),
                web.get("/api/architecture", self._architecture),
                web.get("/api/ablation", self._ablation),
                web.get("/api/importances", self._importances),
                web.get("/report/{name}", self._report),
                web.post("/login", self._login),
            ]
        )

    # -- access control ------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._is_own_name(request.host):
            response: web.StreamResponse = _text(403, f"the host {shown(request.host)} is not this board's")
        elif not self._may_see(request):
            is_page = request.path == "/"
            response = (
                await self._file(request, "login.html") if is_page else _text(401, "the board's token is missing")
            )
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = _text(error.status, error.reason)
            except UNREADABLE as error:
                response = _text(400, said(error))
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    def _is_own_name(self, host: str) -> bool:
        """Whether the requested host is this server's own: a foreign name may resolve to its address as well."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if is_loopback(name) or name == self._host.lower():
            return True
        if is_loopback(self._host):
            return False
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return name in self._names

    def _may_see(self, request: web.Request) -> bool:
        if not self._token or request.path in OPEN:
            return True
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="surrogateescape")
        cookie = request.cookies.get(COOKIE, "").encode(errors="surrogateescape")
        return hmac.compare_digest(bearer, self._token) or hmac.compare_digest(cookie, self._pass().encode())

    def _pass(self) -> str:
        """The cookie that the browser keeps in place of the token."""
        return hmac.new(self._token, b"fedloom board", hashlib.sha256).hexdigest()

    async def _login(self, request: web.Request) -> web.StreamResponse:
        given_token = str((await request.post()).get("token", "")).encode()
        if not self._token or not hmac.compare_digest(given_token, self._token):
            await asyncio.sleep(0.5)  # slows guessing down
            response = await self._file(request, "login.html")
            response.set_status(401)
            return response
        answer = web.Response(status=303, headers={"Location": "/"})
        answer.set_cookie(COOKIE, self._pass(), httponly=True, samesite="Strict", path="/")
        return answer

    # -- answers -------------------------------------------------------------------------------------------------------

    async def _file(self, request: web.Request, name: str) -> web.Response:
        body = await asyncio.to_thread((STATIC / name).read_bytes)
        return _answer(request, lambda: body, hashlib.sha256(body).hexdigest()[:16], TYPES[Path(name).suffix])

    async def refresh(self) -> None:
        """Refreshes the index, unless that was done less than `refresh_s` seconds ago."""
        async with self._refreshing:
            now_s = asyncio.get_running_loop().time()
            if now_s >= self._next_refresh_s:
                await asyncio.to_thread(self.index.refresh)
                self._next_refresh_s = asyncio.get_running_loop().time() + self.refresh_s

    async def _runs(self, request: web.Request) -> web.Response:
        await self.refresh()
        body = await asyncio.to_thread(lambda: to_json(self.index.changes(request.query.get("since", ""))))
        return web.Response(body=body, content_type="application/json")

    def _paths(self, request: web.Request, most: int = MOST_RUNS) -> list[RunPaths]:
        """The runs that a request names; only ids of listed runs are accepted, so that no other text becomes a path."""
        ids = list(dict.fromkeys(request.query.getall("run", [])))
        if not 0 < len(ids) <= most:
            raise ValueError(f"{len(ids)} runs were named: name 1 to {most}")
        return [self.index.paths_of(run_id) for run_id in ids]

    async def _view(self, request: web.Request, stamps: Callable[[], Stamps], make: Callable[[], Any]) -> web.Response:
        """The JSON of a view, or 304 if the files have not changed since the answer that the browser has."""

        def answer() -> web.Response:
            tag = hashlib.sha256(repr((self.index.epoch, request.query_string, stamps())).encode()).hexdigest()[:20]
            return _answer(request, lambda: to_json(make()), tag, "application/json")

        return await asyncio.to_thread(answer)

    def _of_runs(
        self, view: Callable[[views.Reader, list[RunPaths]], Any], *tables: str
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(request: web.Request) -> web.Response:
            paths = self._paths(request)
            return await self._view(
                request,
                lambda: tuple(stamp for p in paths for stamp in stamps_of(p, *tables)),
                lambda: view(self.reader, paths),
            )

        return answer

    async def _curves(self, request: web.Request) -> web.Response:
        query = request.query
        stage, metric, axis = query.get("stage", ""), query.get("metric", "loss"), query.get("axis", "rounds")
        view = partial(views.curves, stage=stage, metric=metric, axis=axis)
        return await self._of_runs(view, "rounds", "evaluations")(request)

    def _of_run(
        self, view: Callable[[views.Reader, RunPaths], Any], *tables: str
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(request: web.Request) -> web.Response:
            (paths,) = self._paths(request, most=1)
            file = views.report_file(paths.root, paths.run_id)
            return await self._view(
                request, lambda: (*stamps_of(paths, *tables), stamp_of(file)), lambda: view(self.reader, paths)
            )

        return answer

    async def _clients(self, request: web.Request) -> web.Response:
        stage, measure = request.query.get("stage", ""), request.query.get("measure", "")
        view = self._of_run(
            lambda reader, paths: views.clients(reader, paths, stage, measure), "clients", "evaluations"
        )
        return await view(request)

    async def _architecture(self, request: web.Request) -> web.Response:
        text = request.query.get("architecture", "")
        view = self._of_run(lambda _, paths: views.architecture(paths, text), "runs")
        return await view(request)

    async def _ablation(self, request: web.Request) -> web.Response:
        folder, stamps = await self._ablation_of(request)
        return await self._view(request, stamps, lambda: views.ablation_view(self.reader, self.index.root, folder))

    async def _importances(self, request: web.Request) -> web.Response:
        folder, stamps = await self._ablation_of(request)
        measure = request.query.get("measure", "")
        view = partial(views.importance_view, self.reader, self.index.root, folder, measure)
        return await self._view(request, stamps, view)

    async def _ablation_of(self, request: web.Request) -> tuple[Path, Callable[[], Stamps]]:
        """The folder of the ablation that a request names, and a function for the stamps that its views depend on."""
        name, root = request.query.get("ablation", ""), self.index.root
        if name not in await asyncio.to_thread(ablation_ids, root):
            raise ValueError(f"no ablation {shown(name)} under {root}")
        folder, report = root / FOLDER / name, views.report_file(root, name)
        return folder, lambda: (*views.ablation_stamps(self.reader, root, folder), stamp_of(report))

    async def _report(self, request: web.Request) -> web.Response:
        name, root = request.match_info["name"], self.index.root
        if name not in await asyncio.to_thread(ablation_ids, root):
            name = self.index.paths_of(name).run_id
        if not views.has_report(root, name):
            return _text(404, f"there is no report yet: fedloom report {name} writes it")
        body = await asyncio.to_thread(read_file, views.report_file(root, name))
        headers = {"Content-Security-Policy": REPORT_POLICY}
        return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)


def _text(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text)


def _answer(request: web.Request, make: Callable[[], bytes], tag: str, kind: str) -> web.Response:
    """The body with its ETag, or 304 if the browser already has the body with this tag."""
    headers = {"ETag": f'"{tag}"'}
    if request.headers.get("If-None-Match") == headers["ETag"]:
        return web.Response(status=304, headers=headers)
    charset = None if kind == "application/json" else "utf-8"
    return web.Response(body=make(), content_type=kind, charset=charset, headers=headers)


async def serve(results: Path, host: str, port: int, token: str, tell: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM; `tell` gets the page's URL when it can be opened.

    Raises ValueError for an address that cannot be bound.
    """
    board = Board(results, host, token)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    runner = web.AppRunner(board.app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ValueError(
                f"{host}:{port} cannot be served ({reason.lower()}): give another --port or --host"
            ) from error
        board.index.start()
        port = runner.addresses[0][1]
        name = platform.node() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        tell(f"http://{name}:{port}/")
        await board.refresh()  # so that the page finds the runs listed
        await ended.wait()
    finally:
        await runner.cleanup()
        board.index.close()


def run_board(results: Path, host: str, port: int, token: str, tell: Callable[[str], None]) -> None:
    """`serve` for a command; returns after Ctrl-C or SIGTERM."""
    check_address(host, token)
    sys.setswitchinterval(0.002)  # lets the page's requests interrupt the background reading
    asyncio.run(serve(results, host, port, token, tell))
