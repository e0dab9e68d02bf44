// Command sbom writes what a Go binary contains, as CycloneDX: sbom BINARY DOCUMENT
//
// The document depends on nothing but the binary, so a build that is repeated has the same one.
package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: sbom BINARY DOCUMENT")
		os.Exit(2)
	}
	if err := write(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

func write(binary, document string) error {
	bom, err := contents(binary)
	if err != nil {
		return err
	}
	f, err := os.Create(document)
	if err != nil {
		return err
	}
	if err := cdx.NewBOMEncoder(f, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom); err != nil {
		_ = f.Close() // the error of the encoder comes first
		return err
	}
	return f.Close()
}

// contents reads the modules of a binary, which the Go linker put there.
func contents(binary string) (*cdx.BOM, error) {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return nil, err
	}
	bytes, err := os.ReadFile(binary)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(bytes)
	program := cdx.Component{
		BOMRef: "program", Type: cdx.ComponentTypeApplication, Name: filepath.Base(binary), Version: release(info),
		Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(sum[:])}},
	}
	modules := []cdx.Component{module("std", strings.TrimPrefix(info.GoVersion, "go"))}
	for _, dep := range info.Deps {
		if dep.Replace != nil {
			dep = dep.Replace
		}
		modules = append(modules, module(dep.Path, dep.Version))
	}
	refs := make([]string, 0, len(modules))
	for _, m := range modules {
		refs = append(refs, m.BOMRef)
	}
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{Component: &program}
	bom.Components = &modules
	bom.Dependencies = &[]cdx.Dependency{{Ref: program.BOMRef, Dependencies: &refs}}
	return bom, nil
}

func module(path, version string) cdx.Component {
	purl := "pkg:golang/" + strings.ToLower(path) + "@" + version
	return cdx.Component{BOMRef: purl, Type: cdx.ComponentTypeLibrary, Name: path, Version: version, PackageURL: purl}
}

// release returns the version that the release build gave to the linker, if any.
func release(info *buildinfo.BuildInfo) string {
	for _, s := range info.Settings {
		if _, value, found := strings.Cut(s.Value, "-X main.release="); s.Key == "-ldflags" && found {
			return strings.Fields(value + " ")[0]
		}
	}
	return info.Main.Version
}
