package model

// sound are the features that the short form uses: those whose promises today's hub is known to keep. The long form uses
// all.
var sound = []string{"deaf"}
