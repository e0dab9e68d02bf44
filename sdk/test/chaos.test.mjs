// The short form of chaos.mjs.
import "./chaos.mjs";
