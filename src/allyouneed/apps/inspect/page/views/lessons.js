"use strict";
/* Lessons: a guided path through the other views (look/views/lessons.py). The lesson is in the hash; its view is drawn below the
   text and keeps its own state beside it. */

const said = (app, both) => both[app.lang] ?? both.en;

/** In an offline file, the other texts are those of one exercise. */
const open = (app, number) => {
  if (app.offline) delete app.state.text;
  app.useExample();
  return app.go("lessons", { lesson: number + 1 });
};

const path = (app, all, current) => AYN.el("ol", { class: "lessons" }, all.map((one, n) => AYN.el("li", {},
  AYN.el("a", { href: app.hash("lessons", { lesson: n + 1 }), "aria-current": n === current && "step", on: { click: (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
    event.preventDefault();
    open(app, n);
  } } }, said(app, one.title)))));

const step = (app, all, number, label, primary = false) => AYN.button(label, () => open(app, number).then(() => (find().focus(), scrollTo(0, 0))), { disabled: !all[number], class: primary ? "primary" : "" });

const find = () => document.getElementById("main");

/** The view of a lesson, with the lesson's state where the reader has not changed it. */
const live = async (app, lesson, place) => {
  const view = AYN.views[lesson.view];
  app.params = { ...lesson.params, ...app.params };
  AYN.clear(place);
  if (view.open) await view.open(place, app);
  else await app.load(place, view.name, view.params(app), (found) => view.render(place, found, app));
  const title = place.querySelector("h1"); // the lesson has the title of the page
  title?.replaceWith(AYN.el("h2", { text: title.textContent }));
};

/** The solution, computed when it is asked for, and what shows it in the view below. */
const solving = (app, lesson, show) => {
  const place = AYN.el("div", { class: "stack", "aria-live": "polite" });
  const button = AYN.button(app.t("lessons.solution"), () => app.load(place, "lessons", { solve: lesson.name }, (found) => {
    const { text, params } = found.data.solution;
    AYN.fill(place, [AYN.el("p", { class: "note" }, AYN.text(said(app, text))),
      Object.keys(params).length > 0 && AYN.el("div", {}, AYN.button(app.t("lessons.show"), () => show(params), { class: "quiet" }))]);
  }));
  return AYN.el("div", { class: "stack" }, AYN.el("div", { class: "row" }, button), place);
};

AYN.view("lessons", {
  order: 15,
  render(root, found, app) {
    const all = found.data.lessons, current = Math.min(Math.max(Number(app.params.lesson ?? 1) - 1, 0), all.length - 1), lesson = all[current];
    const place = AYN.el("div", { class: "stack below" });
    const draw = () => live(app, lesson, place).catch((error) => AYN.clear(place, app.failure(error)));
    const show = (params) => {
      app.params = Object.fromEntries(Object.entries({ ...params, lesson: current + 1 }).map(([name, value]) => [name, value === null ? null : String(value)]));
      draw().then(() => place.scrollIntoView({ block: "start" }));
    };
    AYN.fill(root, [
      AYN.el("div", { class: "split wide-right" },
        AYN.panel(app.t("lessons.all"), path(app, all, current)),
        AYN.el("article", { class: "panel stack lesson" },
          AYN.el("p", { class: "soft small", text: app.t("lessons.number", { number: current + 1, of: all.length, paper: lesson.paper }) }),
          AYN.el("h1", { text: said(app, lesson.title) }),
          said(app, lesson.text).map((one) => AYN.el("p", {}, AYN.text(one))),
          AYN.el("p", { class: "try" }, AYN.el("b", { text: app.t("lessons.try") }), " ", AYN.text(said(app, lesson.try))),
          solving(app, lesson, show),
          AYN.el("div", { class: "row" }, step(app, all, current - 1, app.t("lessons.back")), step(app, all, current + 1, app.t("lessons.next"), true)))),
      place]);
    app.remember({ lesson: current + 1 });
    draw();
  },
});
