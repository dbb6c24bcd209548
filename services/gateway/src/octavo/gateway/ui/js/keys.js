// Owns the keys that the user has given. They live as long as the tab.

const names = { api: "octavo.api-key", admin: "octavo.admin-key" };

export const key = (which) => sessionStorage.getItem(names[which]) ?? "";

export function setKey(which, value) {
  if (value) sessionStorage.setItem(names[which], value);
  else sessionStorage.removeItem(names[which]);
}

export function authorization(which) {
  const value = key(which);
  return value ? { Authorization: `Bearer ${value}` } : {};
}

/** What a refused request says: the message of the error body, else the status. */
export async function refusal(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? `the server answered ${response.status}`;
  } catch {
    return `the server answered ${response.status}`;
  }
}
