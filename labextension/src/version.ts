/** Release of this extension; the same as the Python package's (a test compares them). */
export const VERSION = '0.1.0';
