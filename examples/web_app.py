"""A scheduler in the lifespan of a web application.

It starts and stops with the application, and handlers run in its event loop.

`uvicorn web_app:app` serves it. FastAPI takes the same `lifespan`. Run as a
program it calls itself once.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mainspring import Config, Scheduler

scheduler = Scheduler(
    Config.load({"namespace": "web-app"}, os.environ)
)  # a namespace of the example's own
sent: list[str] = []
mailed = asyncio.Event()


@scheduler.handler(queue="mail", retries=5, timeout="30s")
async def send_mail(to: str) -> None:
    sent.append(to)
    mailed.set()  # of the same event loop


@scheduler.cron("0 2 * * *", name="nightly", timezone="Europe/Paris")
async def clean_up() -> None:
    sent.clear()


async def sign_up(request: Request) -> JSONResponse:
    to = (await request.json())["mail"]
    handle = await send_mail.after("200ms", id=f"welcome-{to}").aput(to=to)
    return JSONResponse({"id": handle.id}, status_code=202)


async def mails(_request: Request) -> JSONResponse:
    return JSONResponse(sent)


async def schedules(_request: Request) -> JSONResponse:
    entries = await scheduler.aentries()
    return JSONResponse(
        [
            {
                "name": one.name,
                "next": [run.isoformat() for run in one.next_runs],
            }
            for one in entries
        ]
    )


@contextlib.asynccontextmanager
async def lifespan(_app: Starlette) -> AsyncIterator[None]:
    async with scheduler:
        yield


app = Starlette(
    routes=[
        Route("/sign-up", sign_up, methods=["POST"]),
        Route("/mails", mails),
        Route("/schedules", schedules),
    ],
    lifespan=lifespan,
)


async def main() -> None:
    import httpx

    web = httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://app"
    )
    async with (
        app.router.lifespan_context(app),
        web,
    ):  # what a web server does at its start
        print(
            (
                await web.post("/sign-up", json={"mail": "ada@example.com"})
            ).json()
        )
        await mailed.wait()
        print((await web.get("/mails")).json())
        [nightly] = (await web.get("/schedules")).json()
        print(nightly["name"], len(nightly["next"]))
        client = await scheduler.client()
        await client.schedules.remove(
            "nightly"
        )  # an example leaves nothing behind


if __name__ == "__main__":
    asyncio.run(main())
