"use strict";
/* The application: state in the URL hash (#/walk?lang=zh&theme=dark&position=2), requests, languages, themes, errors. Texts are kept in
   the entry of the browser's history instead: they come back with its arrows and when the page is reloaded, and stand in no address.

   A view is registered once, in views/NAME.js:

     AYN.view("walk", {
       order: 20,                            // place in the bar
       input: true,                          // it uses the input at the top (text, image or sound); default true
       params(app) { return {…}; },          // what its first request asks for besides the input; default {}
       render(root, document, app) { … },    // draws the document into an empty element
       open(root, app) { … },                // instead of the two above: a view that makes its own requests
     });

   The visible name is the string view.NAME; other strings are NAME.anything in strings.en.json and strings.zh.json (the same keys).

   app.request(view, params)            a promise of a document: from the server, or from the offline file
   app.ask(view, params)                the same with the input of the page (text, target, model, …) added
   app.load(place, view, params, draw)  ask, show that `place` is busy, draw(document, place) into the emptied place; errors are shown
                                        there. Only the latest load of a place is drawn.
   app.input()                          the input as request fields
   app.params                           the view's own state, strings from the hash; app.remember({layer: 2}) writes it there
                                        without drawing again; app.go(view, {layer: 2}) opens another view
   app.t(key, {name: value})            a string in the current language; {name} is replaced; app.known(key, otherwise)
   app.offline, app.models              an offline file; the served models [{id, task}]
   app.announce(text)                   speaks through a screen reader
   app.failure(error, python)           an element that shows an error
   app.python(line)                     sets the Python line below the view (done by itself for the first document) */

AYN.view = (name, view) => {
  AYN.views[name] = { input: true, order: 100, params: () => ({}), ...view, name };
};

AYN.INPUT = ["text", "target", "to", "source"];
AYN.GLOBAL = ["lang", "theme", "model", ...AYN.INPUT];
AYN.TEXTS = ["text", "target", "other", "labels", "patch_text", "prefix", "part"]; // what was written: never in the address
AYN.EXAMPLES = { translation: "机器学习很有趣" };
AYN.EXAMPLE = "Attention is all you need.";
AYN.KIND = { "image-classification": "image", "image-text": "image", transcription: "sound", "audio-classification": "sound" };
AYN.CACHED = 48;
AYN.EXACT = ["float32", "float64"];
AYN.DECODED = ["use", "walk", "why", "what_if", "lessons"]; // views with probabilities of words: the engine's or those of a recorded run
AYN.RECORDED = ["walk", "mixing", "why", "what_if"]; // views whose numbers the view "truth" checks

const find = (id) => document.getElementById(id);

class Failure extends Error {
  constructor(message, { status = 0, python = null, offline = false } = {}) {
    super(message);
    Object.assign(this, { status, python, offline });
  }
}

const app = {
  view: null, params: {}, state: {}, media: {}, models: [], key: null, cache: new Map(), turn: 0,

  t(key, values = {}) {
    const text = app.strings[app.lang]?.[key] ?? app.strings.en[key] ?? key;
    return text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));
  },

  /** The string of a key, or another text where there is none: names that come from a model. */
  known(key, otherwise) {
    return app.strings.en[key] === undefined ? otherwise : app.t(key);
  },

  get lang() {
    return app.state.lang ?? (navigator.language?.toLowerCase().startsWith("zh") ? "zh" : "en");
  },

  announce(text) {
    find("live").textContent = AYN.plain(text);
  },

  // --- state and hash ------------------------------------------------------------------------------------------------

  read(hash) {
    const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
    const all = Object.fromEntries(new URLSearchParams(query));
    const state = {}, params = {};
    for (const [name, value] of Object.entries(all)) (AYN.GLOBAL.includes(name) ? state : params)[name] = value;
    return { view: path, state, params };
  },

  hash(view = app.view, params = app.params, state = app.state) {
    const found = new URLSearchParams();
    for (const [name, value] of [...Object.entries(state), ...Object.entries(params)]) {
      if (value !== null && value !== undefined && value !== "" && !AYN.TEXTS.includes(name)) found.set(name, String(value));
    }
    return `#/${view ?? ""}${found.size ? "?" + found : ""}`;
  },

  /** The texts of a state, for the browser's history. */
  texts({ state, params } = app) {
    const written = (all) => Object.fromEntries(Object.entries(all).filter(([name, value]) => AYN.TEXTS.includes(name) && value));
    return { state: written(state), params: written(params) };
  },

  withTexts(next, texts) {
    return { ...next, state: { ...texts?.state, ...next.state }, params: { ...texts?.params, ...next.params } };
  },

  write(push) {
    try {
      history[push ? "pushState" : "replaceState"]({ own: true, texts: app.texts() }, "", app.view ? app.hash() : undefined);
    } catch { /* a notebook's frame has no history of its own */ }
    app.drawBar();
  },

  remember(changes) {
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === undefined) delete app.params[name];
      else app.params[name] = String(value);
    }
    app.write(false);
  },

  go(view, params = {}, state = {}) {
    Object.assign(app.state, state);
    app.view = view;
    app.params = Object.fromEntries(Object.entries(params).map(([name, value]) => [name, String(value)]));
    app.write(true);
    return app.open();
  },

  // --- requests ------------------------------------------------------------------------------------------------------

  input() {
    const found = {};
    if (app.state.model) found.model = app.state.model;
    for (const name of AYN.INPUT) if (app.state[name]) found[name] = app.state[name];
    const kind = app.inputKind();
    if (kind !== "text" && !app.offline) {
      delete found.text;
      if (app.media[kind]) found[kind] = app.media[kind];
    }
    return found;
  },

  inputKind() {
    const model = app.models.find((one) => one.id === app.state.model) ?? app.models[0];
    return AYN.KIND[model?.task] ?? "text";
  },

  ask(view, params = {}) {
    return app.request(view, { ...app.input(), ...params });
  },

  async request(view, params = {}) {
    const sent = Object.fromEntries(Object.entries(params).filter(([, value]) => value !== null && value !== undefined));
    if (app.offline) return app.stored(view, sent);
    const body = JSON.stringify(sent);
    const key = `${view} ${body}`;
    if (!app.cache.has(key)) app.cache.set(key, await app.post(`look/api/${encodeURIComponent(view)}`, body));
    const found = app.cache.get(key);
    app.cache.delete(key);
    app.cache.set(key, found); // the latest last
    if (app.cache.size > AYN.CACHED) app.cache.delete(app.cache.keys().next().value);
    return found;
  },

  stored(view, sent) {
    const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
    if (view === "lessons") sent = { ...sent, text: undefined }; // the same for every text of the file
    const found = app.documents.find((one) => one.view === view && Object.entries(sent).every(([name, value]) => value === undefined || same(one.request[name], value)));
    if (!found) throw new Failure(app.t("offline.missing"), { offline: true, python: app.documents[0]?.python });
    return found.base === undefined ? found : { ...found, data: { ...app.documents[found.base].data, ...found.data } };
  },

  async post(path, body) {
    return (await app.fetch(path, { method: "POST", body, headers: { "content-type": "application/json" } })).json();
  },

  /** `fetch` with the key, asking for it where the server wants one; errors as the server words them. */
  async fetch(path, options = {}) {
    const headers = { ...options.headers, ...(app.key ? { authorization: `Bearer ${app.key}` } : {}) };
    let answer;
    try {
      answer = await fetch(new URL(path, document.baseURI), { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure(app.t("error.connection"));
    }
    if (answer.status === 401 && (await app.askKey())) return app.fetch(path, options);
    if (!answer.ok) {
      const found = await answer.json().catch(() => ({}));
      throw new Failure(found.error?.message ?? found.error ?? `${answer.status} ${answer.statusText}`, { status: answer.status });
    }
    return answer;
  },

  askKey() {
    app.asking ??= new Promise((resolve) => {
      const field = AYN.el("input", { type: "password", name: "key", required: true, autocomplete: "off" });
      const dialog = AYN.el("dialog", { "aria-label": app.t("key.title") }, AYN.el("form", { method: "dialog", class: "stack" },
        AYN.el("h2", { text: app.t("key.title") }), AYN.el("p", { text: app.t("key.about") }), AYN.field(app.t("key.field"), field),
        AYN.el("div", { class: "row" }, AYN.el("button", { class: "primary", value: "ok", text: app.t("key.use") }),
          AYN.button(app.t("key.cancel"), () => dialog.close("")))));
      dialog.addEventListener("close", () => {
        if (dialog.returnValue === "ok") app.key = field.value.trim();
        dialog.remove();
        app.asking = null;
        resolve(dialog.returnValue === "ok");
      });
      document.body.append(dialog);
      dialog.showModal();
    });
    return app.asking;
  },

  async load(place, view, params, draw) {
    const turn = (place.ayn = (place.ayn ?? 0) + 1);
    place.setAttribute("aria-busy", "true");
    try {
      const found = await app.ask(view, params);
      if (place.ayn !== turn) return;
      AYN.clear(place);
      await draw(found, place);
    } catch (error) {
      if (place.ayn === turn) AYN.clear(place, app.failure(error));
    } finally {
      if (place.ayn === turn) place.setAttribute("aria-busy", "false");
    }
  },

  failure(error, python = error.python) {
    const known = error instanceof Failure;
    if (!known) console.error(error);
    return AYN.el("div", { class: known && error.offline ? "panel note" : "panel error", role: "alert" },
      AYN.el("p", {}, AYN.text(known ? error.message : `${app.t("error.bug")} ${error.message}`)),
      error.offline && [AYN.code("allyouneed serve"), python && AYN.code(python)]);
  },

  python(line) {
    const place = find("foot").querySelector(".python");
    if (place) AYN.clear(place, line && [AYN.el("h2", { text: app.t("python") }), AYN.code(line)]);
  },

  // --- drawing -------------------------------------------------------------------------------------------------------

  /** Views of this page in the order of the bar. */
  shown() {
    return Object.values(AYN.views).filter((one) => app.names.includes(one.name)).sort((a, b) => a.order - b.order);
  },

  /** The view that is open first: in a file, the one it was made for. */
  first() {
    return (app.offline ? app.documents[0]?.view : app.shown()[0]?.name) ?? null;
  },

  link(name, label, props = {}) {
    return AYN.el("a", { href: app.hash(name, {}), ...props, on: { click: (event) => {
      if (event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
      event.preventDefault(); // in a notebook's frame, the hash belongs to the page around it
      app.go(name);
    } } }, label);
  },

  drawBar() {
    const nav = find("nav");
    const focused = document.activeElement?.closest?.("#nav a, #tools button")?.dataset.name;
    nav.setAttribute("aria-label", app.t("nav"));
    AYN.clear(nav, app.shown().map((one) => app.link(one.name, app.t(`view.${one.name}`), { "aria-current": one.name === app.view && "page", data: { name: one.name } })));
    const current = nav.querySelector("[aria-current]");
    if (current) nav.scrollLeft = Math.max(0, current.offsetLeft - nav.offsetLeft - nav.clientWidth / 2 + current.clientWidth / 2);
    const dark = AYN.isDark(), other = app.lang === "zh" ? "en" : "zh";
    AYN.clear(find("tools"),
      AYN.button(other === "zh" ? "中文" : "English", () => app.change({ lang: other }), { class: "quiet", lang: other === "zh" ? "zh-Hans" : "en", data: { name: "lang" }, "aria-label": other === "zh" ? "切换到中文" : "Switch to English" }),
      AYN.button(AYN.svg("svg", { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true" },
        AYN.svg("circle", { cx: 8, cy: 8, r: 6.25, fill: "none", stroke: "currentColor", "stroke-width": 1.5 }),
        AYN.svg("path", { d: "M8 1.75a6.25 6.25 0 0 1 0 12.5z", fill: "currentColor" })),
      () => app.change({ theme: dark ? "light" : "dark" }), { class: "quiet", data: { name: "theme" }, "aria-label": app.t(dark ? "theme.light" : "theme.dark") }));
    if (focused) document.querySelector(`#nav [data-name="${focused}"], #tools [data-name="${focused}"]`)?.focus();
    const own = (id, run) => Object.assign(find(id), { onclick: (event) => (event.preventDefault(), run()) });
    own("brand", () => app.go(app.first())).href = app.hash("", {});
    own("skip", () => find("main").focus()).textContent = app.t("skip");
    document.documentElement.lang = app.lang === "zh" ? "zh-Hans" : "en";
    if (app.state.theme) document.documentElement.dataset.theme = app.state.theme;
  },

  /** Language or theme. */
  change(state) {
    Object.assign(app.state, state);
    app.write(false);
    AYN.themeChanged();
    if (state.lang) app.open();
  },

  drawInput() {
    const form = find("input"), view = AYN.views[app.view];
    form.hidden = !view?.input;
    if (form.hidden) return;
    form.setAttribute("aria-label", app.t("input"));
    AYN.clear(form, app.offline ? app.storedInput() : app.liveInput());
  },

  storedInput() {
    const texts = [...new Set(app.documents.map((one) => one.request?.text).filter(Boolean))];
    if (!texts.length) return null;
    const field = texts.length > 1 ? AYN.select(app.t("input.text"), texts.map((one) => [one, one]), app.state.text, (text) => app.submit({ text }))
      : AYN.el("p", {}, AYN.el("span", { class: "soft small", text: app.t("input.text") + " " }), AYN.el("b", {}, AYN.text(texts[0])));
    return [field, AYN.el("span", { class: "tag", text: app.t("offline") })];
  },

  liveInput() {
    const kind = app.inputKind(), task = (app.models.find((one) => one.id === app.state.model) ?? app.models[0])?.task;
    const wanted = {};
    const set = (name) => (event) => (wanted[name] = event.target.value);
    const text = (name, wide, hint) => AYN.el("label", { class: wide ? "field wide" : "field" }, AYN.el("span", { text: app.t(`input.${name}`) }),
      AYN.el("input", { name, value: app.state[name] ?? "", dir: "auto", size: wide ? 24 : 6, placeholder: hint, on: { input: set(name) } }));
    const area = AYN.el("textarea", { name: "text", rows: 1, dir: "auto", spellcheck: "false", on: { input: set("text"), keydown: (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) (event.preventDefault(), app.submit(wanted));
    } } });
    area.value = app.state.text ?? "";
    const file = () => AYN.el("input", { type: "file", name: kind, accept: `${kind === "image" ? "image" : "audio"}/*`, on: { change: (event) => app.readFile(kind, event.target.files[0]) } });
    const models = app.models.length > 1 && AYN.select(app.t("input.model"), app.models.map((one) => [one.id, one.id]), app.state.model ?? app.models[0].id, (model) => app.submit({ ...wanted, model }));
    const seq2seq = ["translation", "seq2seq", "transcription"].includes(task);
    form_submit(find("input"), () => app.submit(wanted));
    return [
      kind === "text" ? AYN.field(app.t("input.text"), area) : AYN.field(app.t(`input.${kind}`), file()),
      AYN.el("button", { class: "primary", type: "submit", text: app.t("input.run") }),
      AYN.el("div", { class: "more" }, models, task === "translation" && text("to", false, app.t("input.auto")), seq2seq && text("target", true, app.t("input.target.hint"))),
    ];
  },

  submit(changes) {
    for (const [name, value] of Object.entries(changes)) {
      if (value === "") delete app.state[name];
      else app.state[name] = value;
    }
    app.params = {};
    app.write(true);
    return app.open();
  },

  readFile(kind, file) {
    if (!file) return;
    const reader = new FileReader();
    reader.onload = () => ((app.media[kind] = reader.result), app.open());
    reader.readAsDataURL(file);
  },

  drawFoot(found) {
    const model = found?.model;
    AYN.clear(find("foot"), AYN.el("div", { class: "stack" }, AYN.el("div", { class: "python stack" }),
      model && AYN.el("p", { class: "facts" }, ["name", "kind", "task", "parameters", "dtype"].filter((one) => model[one] !== undefined).map((one) =>
        AYN.el("span", {}, app.t(`model.${one}`), " ", AYN.el("b", {}, AYN.text(one === "parameters" ? Number(model[one]).toLocaleString("en") : model[one])))),
      app.names.includes("truth") && AYN.RECORDED.includes(app.view) && app.link("truth", app.t("truth.link"))),
      model && !AYN.EXACT.includes(model.dtype) && AYN.DECODED.includes(app.view) && AYN.el("p", { class: "small soft", text: app.t("model.rounded", { dtype: model.dtype }) })));
    app.python(found?.python);
  },

  async open() {
    const turn = ++app.turn, root = find("main");
    if (!AYN.views[app.view] || !app.names.includes(app.view)) app.view = app.first();
    const view = AYN.views[app.view];
    app.drawBar();
    app.drawInput();
    document.title = `${view ? app.t(`view.${view.name}`) + " · " : ""}allyouneed`;
    if (!view) return;
    root.setAttribute("aria-busy", "true");
    if (!root.childElementCount) AYN.clear(root, AYN.el("p", { class: "waiting", text: app.t("loading") }));
    const draft = AYN.el("div", { class: "stack" });
    let found = null;
    try {
      if (view.open) await view.open(draft, app);
      else {
        if (view.input && !app.offline && !app.hasInput()) throw new Failure(app.t(`input.missing.${app.inputKind()}`));
        found = await app.ask(view.name, view.params(app));
        if (turn !== app.turn) return;
        view.render(draft, found, app);
      }
    } catch (error) {
      AYN.clear(draft, AYN.el("h1", { text: app.t(`view.${view.name}`) }), app.failure(error));
    }
    if (turn !== app.turn) return;
    AYN.clear(root, draft);
    root.setAttribute("aria-busy", "false");
    app.drawFoot(found ?? view.document ?? null);
  },

  hasInput() {
    const kind = app.inputKind();
    return kind === "text" ? Boolean(app.state.text?.trim()) : Boolean(app.media[kind]);
  },

  async start() {
    const data = (id) => JSON.parse(find(id).textContent);
    app.strings = data("strings");
    const { offline, views, documents } = data("documents");
    const given = app.read(location.hash);
    Object.assign(app, { offline, documents, names: views }, app.withTexts(given, history.state?.texts));
    app.drawBar();
    if (offline) app.useExample();
    else await app.findModels();
    const follow = (event) => {
      const next = app.withTexts(app.read(location.hash), event.state?.texts ?? app.texts());
      if (event.state?.own) Object.assign(next.state, { lang: app.state.lang, theme: app.state.theme }); // back keeps both
      const whole = (one) => app.hash(one.view, one.params, one.state) + JSON.stringify(app.texts(one));
      if (whole(next) === whole(app)) return;
      Object.assign(app, next);
      app.useExample();
      AYN.themeChanged();
      app.open();
    };
    addEventListener("popstate", follow); // the arrows of the browser, and a hash that was typed
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (app.drawBar(), AYN.themeChanged()));
    app.write(false); // a text in a link leaves the address
    await app.open();
  },

  /** The text, where the hash has none. */
  useExample() {
    const task = (app.models.find((one) => one.id === app.state.model) ?? app.models[0])?.task;
    app.state.text ??= app.offline ? app.documents.find((one) => one.request?.text)?.request.text : AYN.EXAMPLES[task] ?? AYN.EXAMPLE;
  },

  async findModels() {
    try {
      const found = await (await app.fetch("v1/models")).json();
      app.models = found.data.filter((one) => one.id === one.root);
      app.useExample();
    } catch (error) {
      AYN.clear(find("main"), app.failure(error));
    }
  },
};

const form_submit = (form, run) => (form.onsubmit = (event) => (event.preventDefault(), run()));

AYN.app = app;
AYN.Failure = Failure;
addEventListener("DOMContentLoaded", () => app.start());
