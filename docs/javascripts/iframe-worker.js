// SPDX-License-Identifier: Apache-2.0
// A browser starts no worker for a page that is opened as a file. There the worker of the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.document.open(); // Else Firefox replaces the document later.
      inner.document.write("<!doctype html><body></body>");
      inner.document.close();
      inner.postMessage = data => setTimeout(() => this.dispatchEvent(new MessageEvent("message", {data})));
      this.inner = new Promise((resolve, reject) => {
        const script = inner.document.createElement("script");
        script.onload = () => resolve(inner);
        script.onerror = reject;
        script.src = url;
        inner.document.body.append(script);
      });
    }

    postMessage(data) {
      this.inner.then(inner => inner.dispatchEvent(new MessageEvent("message", {data})));
    }
  };
}
