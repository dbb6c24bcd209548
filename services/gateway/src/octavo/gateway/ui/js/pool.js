// Owns what the page knows of the block pool.

export const STATES = ["free", "granted", "active", "cached", "quarantined", "transferring"];
export const NO_PARENT = -1;
const NOT_PUBLISHED = -2;

export class Pool {
  constructor() {
    this.info = null;
    this.reset(0);
  }

  reset(numBlocks) {
    this.numBlocks = numBlocks;
    this.states = new Uint8Array(numBlocks);
    this.refCounts = new Int32Array(numBlocks);
    this.generations = new Int32Array(numBlocks);
    this.parents = new Int32Array(numBlocks).fill(NOT_PUBLISHED);
    this.parentGenerations = new Int32Array(numBlocks);
    /** sequence id |-> {id, blocks, known, published} */
    this.tables = new Map();
    this.numShared = 0;
    this.numSaved = 0;
    /** Blocks whose picture is old; null: all. */
    this.changed = null;
    this.version = 0;
  }

  forget() {
    this.info = null;
    this.reset(0);
  }

  /** A JSON message of type "pool". */
  takeInfo(message) {
    if (message.is_first || message.num_blocks !== this.numBlocks) this.reset(message.num_blocks);
    this.info = message;
    for (const [id, kept, blocks, known, published] of message.tables) {
      const before = this.tables.get(id);
      const all = kept && before ? before.blocks.slice(0, kept).concat(blocks) : blocks;
      this.tables.set(id, { id, blocks: all, known, published });
    }
    for (const id of message.gone) this.tables.delete(id);
    this.version += 1;
  }

  takeBlocks(changes) {
    const { first, ids, length } = changes;
    for (let at = 0; at < length; at += 1) {
      const block = ids ? ids[at] : first + at;
      const before = this.refCounts[block];
      const now = changes.refCounts[at];
      if (before !== now) {
        this.numShared += (now > 1) - (before > 1);
        this.numSaved += Math.max(0, now - 1) - Math.max(0, before - 1);
      }
      this.states[block] = changes.states[at];
      this.refCounts[block] = now;
      this.generations[block] = changes.generations[at];
      this.parents[block] = changes.parents[at];
      this.parentGenerations[block] = changes.parentGenerations[at];
      this.changed?.push(block);
    }
    if (this.changed && this.changed.length > this.numBlocks) this.changed = null;
    this.version += 1;
  }

  isPublished(block) {
    return this.parents[block] !== NOT_PUBLISHED;
  }

  /** The published block before it; -1 if it is the first of its prefix, -3 if that block is gone. */
  parentOf(block) {
    const parent = this.parents[block];
    if (parent < 0) return parent;
    const isThere = this.isPublished(parent) && this.generations[parent] === this.parentGenerations[block];
    return isThere ? parent : -3;
  }

  /** Sequences whose table lists the block. */
  ownersOf(block) {
    const owners = [];
    for (const table of this.tables.values()) if (table.blocks.includes(block)) owners.push(table.id);
    return owners;
  }
}
