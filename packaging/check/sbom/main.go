// Command sbom writes what a Go binary contains, as CycloneDX: sbom BINARY DOCUMENT VERSION
//
// The document depends on nothing else, so a build that is repeated has the same one.
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
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: sbom BINARY DOCUMENT VERSION")
		os.Exit(2)
	}
	if err := write(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

func write(binary, document, version string) error {
	bom, err := contents(binary, version)
	if err != nil {
		return err
	}
	f, err := os.Create(document) //nolint:gosec // the caller says where
	if err != nil {
		return err
	}
	if err := cdx.NewBOMEncoder(f, cdx.BOMFileFormatJSON).SetPretty(true).EncodeVersion(bom, cdx.SpecVersion1_6); err != nil {
		_ = f.Close() // the error of the encoder comes first
		return err
	}
	return f.Close()
}

// contents reads the modules of a binary, which the Go linker put there. The linker puts no version
// of a release there.
func contents(binary, version string) (*cdx.BOM, error) {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return nil, err
	}
	bytes, err := os.ReadFile(binary) //nolint:gosec // the caller says what
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(bytes)
	program := cdx.Component{
		BOMRef: "program", Type: cdx.ComponentTypeApplication, Name: filepath.Base(binary), Version: version,
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
