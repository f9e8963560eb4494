function startPage() {
  startTheme();
  startTracks();
  startSamples();
}
startPage();
