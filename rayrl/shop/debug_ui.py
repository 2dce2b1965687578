"""Two static pages: a form to play the shop by hand, and a pointer to the trace viewer."""

from __future__ import annotations

DEBUG_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>rayrl shop</title>
<style>
 body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
 pre{white-space:pre-wrap;background:#f4f4f2;padding:1rem;border-radius:6px}
 button,input{font:inherit;margin:.15rem;padding:.2rem .6rem}
</style>
<h1>rayrl shop</h1>
<p><label>Task <input id="task" type="number" value="0"></label>
<label><input id="persona" type="checkbox"> persona</label>
<button id="reset">Reset</button> <button id="release">Release</button> <span id="status" role="status"></span></p>
<p id="instruction"></p>
<form id="search"><label>Search <input id="query" size="40"></label><button>Search</button></form>
<div id="actions"></div><pre id="observation"></pre>
<script>
const $ = id => document.getElementById(id);
let lease = null;
async function call(body) {
  const response = await fetch("/api/shop_agent",
    {method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify(body)});
  const {result} = await response.json();
  if (result.error) { $("status").textContent = result.error; throw new Error(result.error); }
  return result;
}
function show(result) {
  $("observation").textContent = result.observation;
  $("status").textContent = result.done ? "reward " + result.reward + " (" + result.termination_reason + ")" : "";
  $("actions").replaceChildren(...result.observation_state.actions.map(value => {
    const button = document.createElement("button");
    button.textContent = value;
    button.onclick = () => act("click[" + value + "]");
    return button;
  }));
}
async function act(text) { if (lease) show(await call({action: "interact", ...lease, response: text})); }
async function release() {
  if (!lease) return;
  const old = lease;
  lease = null;
  await call({action: "release_one", ...old});
}
$("reset").onclick = async () => {
  await release();
  const result = await call({action: "reset", idx: +$("task").value, if_persona: $("persona").checked});
  lease = {env_idx: result.env_idx, lease_id: result.lease_id};
  $("instruction").textContent = result.task_instruction + " " +
    (Object.keys(result.user_persona).length ? JSON.stringify(result.user_persona) : "");
  show(result);
};
$("release").onclick = release;
$("search").onsubmit = event => { event.preventDefault(); act("search[" + $("query").value + "]"); };
</script></html>
"""

REPLAY_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>rayrl shop</title>
<p>This server keeps no traces. The trace viewer is part of the studio: <code>rayrl studio</code>.</p></html>
"""
