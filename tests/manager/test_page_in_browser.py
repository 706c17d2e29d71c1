"""The manager's page in a real browser: what it shows, that it lives, who may act, and attacks on it."""

from __future__ import annotations

import asyncio
import http.server
import re
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from manager_keys import Keys, calling, token
from playwright.async_api import Browser, Page, Route, expect
from scripted_members import HOST, ScriptedReplica, ScriptedTrainer, one_update, ranks, refused, some_weights, stub_at

from ckpt_engine.channel import ManagerStub
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.manager.service import ManagerConfig, ManagerServer
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.browsing import chromium, looking, picture, says
from tests.waiting import until

pytestmark = pytest.mark.slow

EVIL = "<img src=x onerror=alert(1)>"
CLOSED = f"worker 0 began to write version 1 and did not end: {EVIL}"


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as made:
        yield made


def url_of(manager: ManagerServer, scheme: str = "http") -> str:
    return f"{scheme}://{manager.http_address}/"


class Members:
    """A trainer and replicas that have had an update."""

    def __init__(self, stub: ManagerStub, *names: str, lineage: str = "run") -> None:
        self.trainer = ScriptedTrainer(stub, lineage=lineage)
        self.replicas = [ScriptedReplica(stub, name) for name in names]
        self.updates = 0

    async def join(self) -> None:
        await self.trainer.join(some_weights())
        for replica in self.replicas:
            await replica.open()
        await self.update()

    async def update(self) -> None:
        await one_update([self.trainer], self.replicas, prepares=self.updates == 0)
        self.updates += 1

    async def update_but_the_last(self, reason: str = CLOSED) -> None:
        """An update in which the last replica is quarantined."""
        call, last = self.trainer.update(), self.replicas[-1]
        await self.trainer.seal()
        for replica in self.replicas[:-1]:
            await replica.install()
        order = await last.stream.until(manager_pb2.Install)
        outcome = manager_pb2.ReplicaOutcome(
            replica=last.name, fence=order.fence, outcome=manager_pb2.OUTCOME_QUARANTINED
        )
        outcome.problem.message = reason
        await last.stream.send(outcome=outcome)
        last.workers[0].state = manager_pb2.WORKER_STATE_DIRTY
        last.workers[0].ClearField("identity")
        beat = manager_pb2.ReplicaHeartbeat(sequence=2, workers=last.workers, closed_reason=reason)
        await last.stream.send(heartbeat=beat)
        await call


async def test_an_empty_manager_says_what_to_do_first_and_lives(
    manager: ManagerServer, stub: ManagerStub, browser: Browser
) -> None:
    async with looking(browser, url_of(manager)) as page:
        await says(page, "#first", "Nothing has registered yet")
        await says(page, "#first code", f"ckpt-engine agent --manager {manager.address} -- vllm serve DIR")
        await says(page, "#update-rows", "None yet")
        await says(page, "#refused-rows", "None since the manager started")
        await picture(page, "empty")
        await page.evaluate("document.body.dataset.same = 'yes'")  # lost if the page were loaded again

        members = Members(stub, "rollout-0", "rollout-1")
        await members.join()
        await says(page, ".replicas .row", "rollout-1")
        await expect(page.locator(".replicas .badge.serving")).to_have_count(2)
        await expect(page.locator("#first")).to_be_hidden()
        await says(page, "#lineages", "1\u202frank, published")
        await expect(page.locator("button.update")).to_have_count(1)
        await page.locator("button.update").focus()
        await members.update()
        await expect(page.locator("button.update")).to_have_count(2)
        await says(page, "button.update:focus", "version 0")
        await expect(page.locator("#chart circle")).to_have_count(4)
        call = members.trainer.update()
        await says(page, "#waits", "Waits for rank 0")
        await says(page, "#phase", "sealing")
        await picture(page, "waits")
        await members.trainer.seal()
        await members.replicas[0].install()
        await says(page, "#waits", "Waits for replica rollout-1")
        await says(page, ".replicas .badge", "updating")
        await members.replicas[1].install()
        await call
        await says(page, "#phase", "Idle")
        assert await page.evaluate("document.body.dataset.same") == "yes"


async def test_names_and_reasons_with_html_are_text(
    manager: ManagerServer, stub: ManagerStub, browser: Browser
) -> None:
    members = Members(stub, "a", EVIL, lineage=EVIL)
    await members.join()
    await members.update_but_the_last()
    await refused(members.trainer.update(replicas=[f"nobody {EVIL}"], timeout_seconds=3.0))
    async with looking(browser, url_of(manager)) as page:
        await says(page, ".replicas .name", EVIL)
        await says(page, ".entry.quarantined .why", CLOSED)
        await says(page, "#refused-rows", f"nobody {EVIL}")
        await says(page, "#lineages .name", EVIL)
        await says(page, "#update-rows .why", CLOSED)
        await page.locator("button.update").first.click()
        await says(page, ".one .bad", CLOSED)
        await says(page, ".acts code", f"-- '{EVIL}'")
        await page.get_by_role("button", name="Evict…").first.click()
        await says(page, "dialog h2", f"Evict {EVIL}?")
        await page.keyboard.press("Escape")
        assert await page.locator("img, script:not([src]), iframe, [onerror]").count() == 0
        await picture(page, "quarantined")
    # Nothing that a mistake of ours could do makes HTML of text, either.
    async with looking(browser, url_of(manager), silent=False) as page:
        for attack in (
            "document.body.innerHTML = '<img src=x onerror=alert(1)>'",
            "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
            "document.write('x')",
            "document.createElement('script').text = 'alert(1)'",
        ):
            said = await page.evaluate(f"(() => {{ try {{ {attack} }} catch (error) {{ return error.name }} }})()")
            assert said == "TypeError", attack
        link = "Object.assign(document.createElement('a'), {href: 'javascript:alert(1)'})"
        await page.evaluate(f"document.body.appendChild({link}).click()")
        await page.evaluate("document.body.setAttribute('style', 'color: red')")
        assert await page.evaluate("getComputedStyle(document.body).color") != "rgb(255, 0, 0)"


async def test_phases_of_an_update_are_shown_without_asking_for_the_history(
    manager: ManagerServer, browser: Browser
) -> None:
    asked = list[str]()
    phase = ["idle"]

    async def told(route: Route) -> None:
        overview = await (await route.fetch()).json()
        await route.fulfill(json={**overview, "phase": phase[0]})

    async with looking(browser, url_of(manager)) as page:
        await says(page, "#phase", "Idle")
        await page.evaluate("Date.now = () => 0")  # what is shown does not become old
        await page.route("**/v1/overview", told)
        page.on("request", lambda request: asked.append(request.url) if "history" in request.url else None)
        for phase[0] in ("gathering", "sealing", "installing"):
            await says(page, "#phase", phase[0])
        assert len(asked) == 1
        phase[0] = "idle"
        await says(page, "#phase", "Idle")
        assert len(asked) == 2


async def test_a_call_without_an_answer_is_not_said_to_be_undone(
    manager: ManagerServer, stub: ManagerStub, browser: Browser
) -> None:
    replica = ScriptedReplica(stub, "one")
    await replica.open()
    async with looking(browser, url_of(manager), silent=False) as page:
        await says(page, ".replicas .name", "one")
        await page.get_by_role("button", name="Act on one").click()
        # Every limit has passed at once.
        await page.evaluate("AbortSignal.timeout = () => AbortSignal.abort(new DOMException('', 'TimeoutError'))")
        await page.get_by_role("button", name="Evict…").click()
        await page.locator("#evict").click()
        await says(page, ".told.bad", "evict: no answer within 10 s: look at the state")


WORDS = ("rollout-0", EVIL, "it's odd", "-rf", "$(id)", "a b", "`id`", 'a"b', "a\\nb", "a\nb", "a\u202eb'\\", "~", "")
WORDS += ("ü", "a;id", "!x")


async def test_a_copied_name_is_one_word_for_a_shell(manager: ManagerServer, browser: Browser) -> None:
    async with looking(browser, url_of(manager)) as page:
        for word in WORDS:
            said = await page.evaluate("async (word) => (await import('/page/words.js')).quoted(word)", word)
            assert said.isprintable(), "what is pasted is what is seen"
            shell = ["bash", "-c", f"printf %s {said}"]
            done = await asyncio.to_thread(subprocess.run, shell, stdout=subprocess.PIPE, check=True, timeout=60)
            assert done.stdout.decode() == word


async def test_an_update_is_opened_into_its_edges(manager: ManagerServer, stub: ManagerStub, browser: Browser) -> None:
    members = Members(stub, "rollout-0", "rollout-1")
    await members.join()
    async with looking(browser, url_of(manager)) as page:
        toggle = page.locator("button.update")
        await toggle.focus()
        await page.keyboard.press("Enter")
        await expect(toggle).to_have_attribute("aria-expanded", "true")
        edges = page.locator(".one .edges")
        await expect(edges).to_have_count(2)
        for words in ("rank 0", "worker 0", "shared memory", "224\u202fB"):
            await expect(edges.first).to_contain_text(words)
        await expect(page.locator(".one .badge").first).to_have_text("new and serving")
        await expect(page.locator("button.update .bar")).to_have_attribute(
            "aria-label", re.compile("quiesce 10\u202fms")
        )
        await picture(page, "opened")
        await page.set_viewport_size({"width": 390, "height": 800})
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        await picture(page, "opened-phone")
        await page.keyboard.press("Enter")
        await expect(page.locator(".one").first).to_be_hidden()


async def test_who_may_retries_and_evicts(manager: ManagerServer, stub: ManagerStub, browser: Browser) -> None:
    members = Members(stub, "a/b", "it's odd")
    await members.join()
    await members.update_but_the_last("the reason")
    async with looking(
        browser, url_of(manager), silent=False, permissions=["clipboard-read", "clipboard-write"]
    ) as page:
        broken = page.locator(".entry.quarantined")
        await says(page, ".entry.quarantined .why", "the reason")
        command = broken.locator(".command").filter(has_text="retry")
        await expect(command.locator("code")).to_have_text(
            f"ckpt-engine replica retry --manager {manager.address} -- 'it'\\''s odd'"
        )
        await command.get_by_role("button", name="Copy").click()
        assert (await page.evaluate("navigator.clipboard.readText()")).endswith("-- 'it'\\''s odd'")
        await broken.get_by_role("button", name="Retry", exact=True).click()
        await says(page, ".told.bad", "retry was not done: ")  # nothing stays sealed that it could be brought up with
        serving = page.locator(".entry.serving")
        await expect(serving.locator(".acts")).to_be_hidden()
        await serving.get_by_role("button", name="Act on a/b").click()
        await expect(serving.get_by_role("button", name="Retry", exact=True)).to_be_hidden()
        await serving.get_by_role("button", name="Hold", exact=True).click()
        await says(page, ".entry.serving .why", "held by an operator since")
        await expect(serving.locator(".command").filter(has_text="replica release")).to_be_visible()
        await serving.get_by_role("button", name="Release", exact=True).click()
        await says(page, ".entry.serving .told.good", "released; ")
        await expect(serving.get_by_role("button", name="Hold", exact=True)).to_be_visible()
        await serving.get_by_role("button", name="Evict…").click()
        await page.locator("#reason").fill("by a test")
        await page.locator("#evict").click()
        await expect(serving).to_have_count(0)
        told = await members.replicas[0].stream.until(manager_pb2.Refused)
        assert "was evicted by an operator: by a test" in told.problem.message
    assert [each.name for each in manager.status().replicas] == ["it's odd"]


async def test_a_token_is_asked_for_and_kept_nowhere(asking: ManagerServer, keys: Keys, browser: Browser) -> None:
    url = url_of(asking, "https")
    async with (
        calling(asking, keys.with_token("replica")) as stub,
        looking(browser, url, silent=False, ignore_https_errors=True) as page,
    ):
        replica = ScriptedReplica(stub, "one")
        await replica.open()
        closed = manager_pb2.ReplicaHeartbeat(sequence=2, workers=replica.workers, closed_reason="it is closed")
        await replica.stream.send(heartbeat=closed)

        async def enter(role: str) -> None:
            await page.locator("#token").fill(token(role))
            await page.keyboard.press("Enter")

        await says(page, "#ask", "This manager asks for a token")
        await picture(page, "token")
        assert "one" not in await page.locator("#all").inner_text()
        await enter("stranger")
        await says(page, "#ask-problem", "the token is none of this manager's")
        await enter("viewer")
        await says(page, ".replicas .why", "it is closed")
        await says(page, "footer", "may only look")
        await expect(page.get_by_role("button", name="Evict…")).to_have_count(0)
        await expect(page.locator(".command").filter(has_text="evict")).to_be_visible()
        # Whoever unhides a button is refused by the manager.
        await page.evaluate("document.querySelector('.acts .danger').parentElement.hidden = false")
        await page.evaluate("document.querySelector('.acts .danger').click()")
        await page.locator("#evict").click()
        await says(page, ".told.bad", "may not act as operator")
        kept = "[localStorage.length, sessionStorage.length, document.cookie, location.href, history.length]"
        assert (await page.evaluate(kept))[:4] == [0, 0, "", url]
        assert token("viewer") not in await page.content()
        assert await page.evaluate("document.getElementById('token').value") == ""
        assert await page.context.cookies() == []

        await page.reload()
        await says(page, "#ask", "This manager asks for a token")
        await enter("operator")
        await expect(page.get_by_role("button", name="Evict…")).to_be_visible()
        await page.get_by_role("button", name="Forget the token").click()
        await expect(page.locator("#ask")).to_be_visible()
        await expect(page.locator("#all")).to_be_hidden()
        await expect(page.locator("#replica-rows")).to_be_empty()
        assert "it is closed" not in await page.content()
        await enter("operator")
        await page.get_by_role("button", name="Evict…").click()
        await page.locator("#evict").click()
        await says(page, "#first", "Nothing has registered yet")


async def test_a_manager_that_has_gone_is_said_to_have_gone(config: ManagerConfig, browser: Browser) -> None:
    async with ManagerServer(config) as manager:
        address = manager.http_address
        async with looking(browser, url_of(manager), silent=False) as page, stub_at(manager.address) as stub:
            replica = ScriptedReplica(stub, "one")
            await replica.open()
            await says(page, ".replicas .name", "one")
            await manager.stop()
            await says(page, "#link", "the manager does not answer; what is shown is")
            assert "one" in await page.locator(".replicas").inner_text()
            async with ManagerServer(replace(config, http=address)):
                await says(page, "#link", "live")
                await says(page, "#first", "Nothing has registered yet")


CONTRAST = """() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((each) => each / 255)
    .map((each) => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, index) => sum + each * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const color = numbers(getComputedStyle(each).backgroundColor);
      if (color.length < 4 || color[3] > 0.99) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((each) => each.nodeType === 3 && each.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest('.unseen, .skip, svg')) continue;
    const front = light(numbers(getComputedStyle(element).color));
    const [one, other] = [front, light(behind(element))].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (other + 0.05);
    if (ratio < 4.5) poor.push(`${element.textContent.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""


@pytest.mark.parametrize("width", [1280, 390, 320])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_can_be_read_on_a_phone_and_in_the_dark(
    manager: ManagerServer, stub: ManagerStub, browser: Browser, width: int, scheme: Any
) -> None:
    long = "a-name-that-goes-on-" * 6
    members = Members(stub, "rollout-0", long, lineage="lineage-" * 12)
    await members.join()
    await members.update()
    await members.update_but_the_last("no space in this word: " + "x" * 300)
    await refused(members.trainer.update(replicas=["nobody"], timeout_seconds=3.0))
    view = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    async with looking(browser, url_of(manager), **view) as page:
        await says(page, ".replicas .name", long)
        await page.locator("button.update").first.click()
        await page.locator(".one").first.wait_for()
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert await page.evaluate(CONTRAST) == []
        back = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(int(each) for each in back[4:-1].split(",")) < 200) == (scheme == "dark")
        await picture(page, f"{scheme}-{width}")


async def test_every_control_has_a_name_and_is_reached_with_the_keyboard(
    manager: ManagerServer, stub: ManagerStub, browser: Browser
) -> None:
    members = Members(stub, "rollout-0", "rollout-1")
    await members.join()
    await members.update_but_the_last()
    async with looking(browser, url_of(manager)) as page:
        await page.locator(".entry.quarantined .acts").wait_for()
        reached = set[str]()
        for _ in range(40):
            await page.keyboard.press("Tab")
            reached.add(await page.evaluate("document.activeElement.innerText || document.activeElement.tagName"))
        for words in ("Skip to content", "Act", "Retry", "Evict…", "Copy", "HTTP interface"):
            assert words in reached, reached
        assert any("version 1" in each for each in reached)
        nameless = "[...document.querySelectorAll('button, a, input')].filter((each) => each.checkVisibility() && \
            !(each.innerText || each.ariaLabel || each.labels?.length)).length"
        assert await page.evaluate(nameless) == 0
        assert await page.evaluate("document.documentElement.lang") == "en"
        levels = await page.evaluate("[...document.querySelectorAll('h1, h2')].map((each) => each.tagName)")
        assert levels.count("H1") == 1
        await page.locator("button.update").first.press("Enter")
        await page.get_by_role("button", name="Evict…").first.press("Enter")
        await expect(page.locator("#keep")).to_be_focused()
        await page.keyboard.press("Escape")
        await expect(page.locator("dialog")).to_be_hidden()
        assert len(manager.status().replicas) == 2


@contextmanager
def served(body: str) -> Iterator[int]:
    """An attacker's site on a port of loopback."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_pages_of_strangers_neither_read_nor_change_nor_frame_it(
    manager: ManagerServer, stub: ManagerStub
) -> None:
    members = Members(stub, "rollout-0")
    await members.join()
    port = manager.http_address.rpartition(":")[2]
    attack = """async ([url, options]) => {
      try { const answer = await fetch(url, options); return [answer.status, await answer.text()]; }
      catch (error) { return [0, error.name]; }
    }"""
    evict = "/v1/replicas/rollout-0/evict"
    post = {"method": "POST", "body": "{}"}
    rules = "--host-resolver-rules=MAP evil.example 127.0.0.1, MAP localhost.evil.example 127.0.0.1"
    # Newer browsers ask before a page of the network may reach this machine; others do not.
    async with chromium(rules, "--disable-features=LocalNetworkAccessChecks,PrivateNetworkAccessChecks") as browser:
        # The attacker's name leads to the manager itself, as after its DNS answer has changed.
        for host in ("evil.example", "localhost.evil.example"):
            theirs = f"http://{host}:{port}/"
            async with looking(browser, theirs, silent=False) as page:
                assert "serves its own machine only" in await page.content()
                # Their own server had answered before that, and said nothing of what the page may not do.
                await page.route(
                    theirs, lambda route: route.fulfill(body="<title>attack</title>", content_type="text/html")
                )
                await page.goto(theirs)
                assert await page.title() == "attack"
                for route in ("/v1/overview", "/metrics", "/healthz", "/page/page.js"):
                    status, text = await page.evaluate(attack, [route, {}])
                    assert (status, "rollout" in text) == (403, False), route
                json = {**post, "headers": {"content-type": "application/json"}}
                assert (await page.evaluate(attack, [evict, json]))[0] == 403
        with served(f"<title>attack</title><iframe src='http://127.0.0.1:{port}/'></iframe>") as other:
            for host in ("evil.example", "127.0.0.1", "localhost"):
                async with looking(browser, f"http://{host}:{other}/", silent=False) as page:
                    await _attacked(page, f"http://127.0.0.1:{port}", attack, evict, post)
    assert [each.name for each in manager.status().replicas] == ["rollout-0"]
    assert manager.status().replicas[0].connected


async def _attacked(page: Page, target: str, attack: str, evict: str, post: dict[str, Any]) -> None:
    """From a page of another origin: reading is refused by the browser, changing by the manager, the frame is empty."""
    assert (await page.evaluate(attack, [f"{target}/v1/overview", {}]))[0] == 0
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        for mode in ("cors", "no-cors"):
            options = {**post, "mode": mode, "headers": {"content-type": kind}}
            status, _ = await page.evaluate(attack, [target + evict, options])
            assert status == 0, (kind, mode)  # not even told what came of it
    form = f"""() => {{
      const [form, frame] = [document.createElement('form'), document.createElement('iframe')];
      Object.assign(form, {{ method: 'post', action: '{target}{evict}', target: 'away' }});
      frame.name = 'away';
      document.body.append(frame, form);
      return new Promise((done) => {{ frame.onload = done; form.submit(); }});
    }}"""
    await page.evaluate(form)
    for frame in page.frames[1:]:
        assert not frame.url.startswith(target), "it was framed"


async def test_the_interface_is_drawn_without_a_violation(manager: ManagerServer, browser: Browser) -> None:
    async with looking(browser, url_of(manager)) as page:
        await page.goto(url_of(manager) + "docs")
        for words in ("look", "operate", "Bring a quarantined replica to the latest version now"):
            await page.get_by_text(words).first.wait_for()
        await picture(page, "docs")


async def test_relays_are_shown_with_what_they_hold(
    manager: ManagerServer, stub: ManagerStub, browser: Browser
) -> None:
    session = stub.HolderSession()
    filling = manager_pb2.Filling(memory_bytes=200 * 10**9)
    hello = manager_pb2.HolderHello(
        digest_format=DIGEST_FORMAT, kind="relay", name=EVIL, session_id="s", host=HOST, filling=filling
    )
    await session.write(manager_pb2.HolderMessage(hello=hello))
    async with looking(browser, url_of(manager)) as page:
        await says(page, ".relays .name", EVIL)
        await says(page, ".relays .row", "nothing200.0\u202fGB of memory")
        filled = manager_pb2.RelayFilled(identity=weights_pb2.Identity(lineage="run", version=3), bytes=10**9)
        filled.problem.message = f"its source is gone: {EVIL}"
        await session.write(manager_pb2.HolderMessage(filled=filled))
        await says(page, ".relays .why", f"version 3: its source is gone: {EVIL}")
        await says(page, ".relays .row", "nothing")
        coming = weights_pb2.Identity(lineage=EVIL, version=4, root=b"4")
        progress = manager_pb2.RelayProgress(bytes_done=1, bytes_total=4, identity=coming)
        await session.write(manager_pb2.HolderMessage(progress=progress))
        await says(page, ".relays .badge", "filling, 25 %")
        await says(page, ".relays .share", f"4 of {EVIL}25\u202f%")
        await expect(page.locator(".relays .share .coming")).to_have_attribute("style", "width: 25%;")
        await expect(page.locator(".relays .share")).to_have_attribute("title", "1\u202fB of 4\u202fB, coming")
        await picture(page, "relay")
        session.cancel()
        await says(page, ".relays .badge", "away")


async def test_a_refusal_is_told_with_its_reason(manager: ManagerServer, stub: ManagerStub, browser: Browser) -> None:
    trainers = await ranks(stub, some_weights(), some_weights(sizes=(8, 6)))
    replica = ScriptedReplica(stub, "rollout-0")
    await replica.open()
    async with looking(browser, url_of(manager)) as page:
        call = trainers[0].update(timeout_seconds=60.0, version=7)
        await says(page, "#phase", "rank 1 has not called update_weights")
        await picture(page, "gathering")
        for each in (call, trainers[1].update(timeout_seconds=60.0, version=7)):
            problem = await refused(each)
        await says(page, ".refusal", problem.message)
        await says(page, ".refusal", "ranks 0, 1")
        await says(page, "#refused-title", "Refused updates (1)")
        await until(lambda: not manager.status().phase.startswith("gather"), "it is over")
        await says(page, ".refusal .badge", "invalid argument")
        await picture(page, "refusal")
