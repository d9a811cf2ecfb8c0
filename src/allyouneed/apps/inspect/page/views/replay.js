"use strict";
/* Training replay (look/views/replay.py): the answers of the checkpoints of a run beside its loss curve, and other views of each. */

const INSIDE = ["use", "walk", "mixing", "why", "truth"];

/** The application as seen by a view of one checkpoint: its requests go to that checkpoint. */
const checkpointApp = (app, run, step) => {
  const inner = Object.create(app);
  inner.request = async (view, params = {}) => {
    const { model, text, ...rest } = params;
    const sent = Object.fromEntries(Object.entries(rest).filter(([, value]) => value !== null && value !== undefined));
    const more = app.offline ? {} : { request: sent };
    const found = await app.request("replay", { run, step, view: view === "use" ? undefined : view, text, ...(Object.keys(sent).length ? more : {}) });
    return { ...found.data.document, python: found.python };
  };
  inner.ask = (view, params = {}) => inner.request(view, { ...app.input(), ...params });
  inner.load = async (place, view, params, draw) => {
    const turn = (place.ayn = (place.ayn ?? 0) + 1);
    try {
      const found = await inner.ask(view, params);
      if (place.ayn === turn) await draw(found, AYN.clear(place));
    } catch (error) {
      if (place.ayn === turn) AYN.clear(place, app.failure(error));
    }
  };
  return inner;
};

const drawInside = async (app, run, step, place) => {
  const turn = (place.turn = (place.turn ?? 0) + 1);
  const name = app.params.inside ?? "use", view = AYN.views[name];
  const inner = checkpointApp(app, run, step), body = AYN.el("div", { class: "stack" });
  place.setAttribute("aria-busy", "true");
  try {
    const found = await inner.ask(name, view.render && view.name !== "use" ? view.params(inner) : {});
    if (place.turn !== turn) return;
    view.render(body, found, inner);
    app.python(found.python);
  } catch (error) {
    AYN.clear(body, app.failure(error));
  }
  if (place.turn !== turn) return;
  AYN.clear(place, body);
  place.setAttribute("aria-busy", "false");
};

const drawAnswers = (app, data, pick) => {
  const validated = data.checkpoints.some((one) => Object.keys(one.scores ?? {}).length);
  const head = [app.t("replay.step"), app.t("replay.answer"), app.t("replay.log_prob"), ...(validated ? [app.t("replay.valid")] : [])];
  const rows = data.answers.map((one) => {
    const about = data.checkpoints.find((other) => other.step === one.step);
    const scores = Object.entries(about?.scores ?? {}).map(([name, x]) => `${name} ${AYN.format(x)}`).join(", ");
    const shown = one.error ? AYN.el("span", { class: "down" }, AYN.text(one.error)) : one.tokens?.length
      ? AYN.el("div", { class: "answers" }, one.tokens.map((tokens, part) => tokens.map((text, n) => {
        const token = AYN.el("span", { class: "token small" }, AYN.tokenText({ text }));
        AYN.paint(token, Math.exp(one.log_probs[part][n] ?? 0));
        return token;
      }))) : AYN.prose(one.answer ?? "");
    const step = AYN.el("span", { class: "row" }, AYN.button(one.step.toLocaleString("en"), () => pick(one.step), { "aria-label": app.t("replay.open", { step: one.step }) }), about?.best && AYN.el("span", { class: "tag accent", text: app.t("replay.best") }));
    return [step, shown, one.log_prob ?? "–", ...(validated ? [scores] : [])];
  });
  return AYN.panel(app.t("replay.answers"), AYN.table(head, rows, { numeric: [2], label: app.t("replay.answers") }));
};

const drawCurve = (app, data, step, pick) => {
  const { curve } = data;
  const series = [{ name: app.t("replay.loss"), x: curve.steps, y: curve.loss }];
  if (curve.valid.some((one) => "loss" in one.scores)) {
    const valid = new Map(curve.valid.map((one) => [one.step, one.scores.loss]));
    series.push({ name: app.t("replay.valid.loss"), x: [...valid.keys()], y: [...valid.values()] });
  }
  const nearest = (x) => data.checkpoints.reduce((a, b) => (Math.abs(a.step - x) <= Math.abs(b.step - x) ? a : b)).step;
  return curve.steps.length ? AYN.panel(app.t("replay.curve"), AYN.el("p", { class: "soft small", text: app.t(curve.mean_of > 1 ? "replay.mean" : "replay.every", { count: curve.mean_of }) }),
    AYN.curve({ series, xLabel: app.t("replay.step"), label: app.t("replay.curve"), marks: [{ x: step, label: app.t("replay.here") }], onSelect: (x) => pick(nearest(x)) })) : null;
};

const drawRun = (app, found, place) => {
  const data = found.data, steps = data.answers.filter((one) => !one.error).map((one) => one.step);
  let step = steps.includes(Number(app.params.step)) ? Number(app.params.step) : steps.at(-1);
  const curve = AYN.el("div"), inside = AYN.el("div", { class: "stack" }), bar = AYN.el("div", { class: "row end" });
  const views = INSIDE.filter((name) => AYN.views[name]?.render && (app.offline ? app.documents.some((one) => one.view === "replay" && (one.request.view ?? "use") === name && one.request.step !== undefined) : app.names.includes(name)));
  const show = () => {
    AYN.clear(curve, drawCurve(app, data, step, pick));
    AYN.clear(bar, steps.length > 1 && AYN.slider(app.t("replay.checkpoint"), { min: 0, max: steps.length - 1, value: steps.indexOf(step), show: (n) => steps[n].toLocaleString("en") }, (n) => pick(steps[n], true)),
      views.length > 1 && AYN.choice(app.t("replay.view"), views.map((name) => [name, app.t(`view.${name}`)]), app.params.inside ?? "use", (name) => (app.remember({ inside: name }), drawInside(app, data.run, step, inside))));
    if (step !== undefined) return drawInside(app, data.run, step, inside);
  };
  const pick = (wanted, keep) => {
    step = steps.includes(wanted) ? wanted : steps.reduce((a, b) => (Math.abs(a - wanted) <= Math.abs(b - wanted) ? a : b));
    app.remember({ step });
    app.announce(app.t("replay.opened", { step }));
    if (keep) (AYN.clear(curve, drawCurve(app, data, step, pick)), drawInside(app, data.run, step, inside));
    else show();
  };
  AYN.fill(place, [curve, data.answers.length ? drawAnswers(app, data, pick) : AYN.el("p", { class: "note", text: app.t("replay.text") }), steps.length > 0 && bar, inside]);
  return show();
};

AYN.view("replay", {
  order: 80,
  async open(root, app) {
    const place = AYN.el("div", { class: "stack" }), bar = AYN.el("div", { class: "row" });
    AYN.fill(root, [AYN.title(app, "replay"), bar, place]);
    if (app.offline) return app.load(place, "replay", {}, (found, inner) => ((AYN.views.replay.document = found), drawRun(app, found, inner)));
    const { runs } = (await app.request("replay", {})).data;
    if (!runs.length) return AYN.fill(place, [AYN.el("p", { class: "note", text: app.t("replay.none") })]);
    const chosen = runs.some((one) => one.name === app.params.run) ? app.params.run : runs[0].name;
    const load = (run) => app.request("replay", { run, text: app.state.text });
    const show = async (run) => {
      place.setAttribute("aria-busy", "true");
      try {
        const found = await load(run);
        AYN.views.replay.document = found;
        app.drawFoot(found);
        await drawRun(app, found, AYN.clear(place));
      } catch (error) {
        AYN.clear(place, app.failure(error));
      }
      place.setAttribute("aria-busy", "false");
    };
    AYN.fill(bar, [AYN.select(app.t("replay.run"), runs.map((one) => [one.name, `${one.name} (${one.checkpoints})`]), chosen, (run) => (app.remember({ run, step: null }), show(run)))]);
    await show(chosen);
  },
});
