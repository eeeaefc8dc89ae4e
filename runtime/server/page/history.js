// What the page holds, kept by the browser so that it survives a reload; nothing of it goes to the server.

const STORE = "page", KEY = "chat";

function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open("vtx", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

const store = opened().catch(() => null); // a browser that keeps nothing: the page works without

export async function remember(state) {
  (await store)?.transaction(STORE, "readwrite").objectStore(STORE).put(state, KEY);
}

export async function recall() {
  const database = await store;
  if (!database) return null;
  return new Promise((resolve) => {
    const request = database.transaction(STORE).objectStore(STORE).get(KEY);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
  });
}
