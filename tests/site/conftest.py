"""The browser that the site is read in."""

import browsers

chromium = browsers.chromium
