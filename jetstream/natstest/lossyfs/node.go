//go:build linux

package lossyfs

import (
	"context"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// node is an object, as the kernel sees it.
type node struct {
	fs.Inode
	sys *System
	obj *object
}

// handle is an open file.
type handle struct{ sync bool }

var (
	_ fs.NodeLookuper  = (*node)(nil)
	_ fs.NodeReaddirer = (*node)(nil)
	_ fs.NodeGetattrer = (*node)(nil)
	_ fs.NodeSetattrer = (*node)(nil)
	_ fs.NodeMkdirer   = (*node)(nil)
	_ fs.NodeCreater   = (*node)(nil)
	_ fs.NodeUnlinker  = (*node)(nil)
	_ fs.NodeRmdirer   = (*node)(nil)
	_ fs.NodeRenamer   = (*node)(nil)
	_ fs.NodeOpener    = (*node)(nil)
	_ fs.NodeReader    = (*node)(nil)
	_ fs.NodeWriter    = (*node)(nil)
	_ fs.NodeFsyncer   = (*node)(nil)
	_ fs.NodeStatfser  = (*node)(nil)
)

// attributes fills in what stat shows.
func (o *object) attributes(out *fuse.Attr) {
	out.Ino, out.Mode, out.Nlink = o.number, o.mode, 1
	out.Size, out.Blksize = uint64(len(o.data)), page
	out.Blocks = (out.Size + 511) / 512
	out.SetTimes(nil, &o.time, &o.time)
}

// inode is the node of an object, new or known to the kernel.
func (n *node) inode(ctx context.Context, o *object, out *fuse.EntryOut) *fs.Inode {
	o.attributes(&out.Attr)
	return n.NewInode(ctx, &node{sys: n.sys, obj: o}, fs.StableAttr{Mode: o.mode & syscall.S_IFMT, Ino: o.number})
}

func (n *node) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	leave, failed := n.sys.enter()
	if failed {
		return nil, syscall.EIO
	}
	defer leave()
	o, ok := n.obj.names[name]
	if !ok {
		return nil, syscall.ENOENT
	}
	return n.inode(ctx, o, out), 0
}

func (n *node) Readdir(context.Context) (fs.DirStream, syscall.Errno) {
	leave, failed := n.sys.enter()
	if failed {
		return nil, syscall.EIO
	}
	defer leave()
	entries := make([]fuse.DirEntry, 0, len(n.obj.names))
	for name, o := range n.obj.names {
		entries = append(entries, fuse.DirEntry{Name: name, Ino: o.number, Mode: o.mode})
	}
	return fs.NewListDirStream(entries), 0
}

func (n *node) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	leave, failed := n.sys.enter()
	if failed {
		return syscall.EIO
	}
	defer leave()
	n.obj.attributes(&out.Attr)
	return 0
}

func (n *node) Setattr(_ context.Context, _ fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	leave, failed := n.sys.enter()
	if failed {
		return syscall.EIO
	}
	defer leave()
	if size, ok := in.GetSize(); ok {
		if errno := n.sys.take(int64(size) - int64(len(n.obj.data))); errno != 0 { //nolint:gosec // files are in memory
			return errno
		}
		n.sys.log(n.obj.truncate(int(size)), n.obj) //nolint:gosec // as above
	}
	if mode, ok := in.GetMode(); ok {
		n.obj.mode = n.obj.mode&syscall.S_IFMT | mode&0o7777
	}
	n.obj.attributes(&out.Attr)
	return 0
}

func (n *node) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	leave, failed := n.sys.enter()
	if failed {
		return nil, syscall.EIO
	}
	defer leave()
	return n.inode(ctx, n.add(name, unix.S_IFDIR|mode&0o7777), out), 0
}

func (n *node) Create(ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	leave, failed := n.sys.enter()
	if failed {
		return nil, nil, 0, syscall.EIO
	}
	defer leave()
	return n.inode(ctx, n.add(name, unix.S_IFREG|mode&0o7777), out), newHandle(flags), 0, 0
}

// add makes an object in a directory.
func (n *node) add(name string, mode uint32) *object {
	o := n.sys.newObject(mode)
	n.sys.log(n.obj.link(name, o), n.obj, o)
	return o
}

func (n *node) Unlink(_ context.Context, name string) syscall.Errno { return n.remove(name) }
func (n *node) Rmdir(_ context.Context, name string) syscall.Errno  { return n.remove(name) }

func (n *node) remove(name string) syscall.Errno {
	leave, failed := n.sys.enter()
	if failed {
		return syscall.EIO
	}
	defer leave()
	switch o, ok := n.obj.names[name]; {
	case !ok:
		return syscall.ENOENT
	case len(o.names) > 0:
		return syscall.ENOTEMPTY
	}
	n.sys.log(n.obj.link(name, nil), n.obj)
	return 0
}

func (n *node) Rename(_ context.Context, name string, parent fs.InodeEmbedder, newName string, flags uint32) syscall.Errno {
	leave, failed := n.sys.enter()
	if failed {
		return syscall.EIO
	}
	defer leave()
	to, ok := parent.(*node)
	if !ok || flags != 0 {
		return syscall.ENOTSUP
	}
	o, ok := n.obj.names[name]
	if !ok {
		return syscall.ENOENT
	}
	old, replaced := to.obj.names[newName]
	switch {
	case old == o:
		return 0
	case replaced && len(old.names) > 0:
		return syscall.ENOTEMPTY
	case replaced:
		n.sys.along[o] = len(o.data)
	}
	gone, there := n.obj.link(name, nil), to.obj.link(newName, o)
	n.sys.log(func() { gone(); there() }, n.obj, to.obj, o)
	return 0
}

func newHandle(flags uint32) *handle { return &handle{sync: flags&(unix.O_SYNC|unix.O_DSYNC) != 0} }

func (n *node) Open(_ context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	leave, failed := n.sys.enter()
	if failed {
		return nil, 0, syscall.EIO
	}
	defer leave()
	if flags&unix.O_TRUNC != 0 && len(n.obj.data) > 0 {
		n.sys.log(n.obj.truncate(0), n.obj)
	}
	return newHandle(flags), 0, 0
}

func (n *node) Read(_ context.Context, _ fs.FileHandle, dest []byte, offset int64) (fuse.ReadResult, syscall.Errno) {
	leave, failed := n.sys.enter()
	if failed {
		return nil, syscall.EIO
	}
	defer leave()
	from := min(int(offset), len(n.obj.data))
	return fuse.ReadResultData(dest[:copy(dest, n.obj.data[from:])]), 0
}

func (n *node) Write(_ context.Context, f fs.FileHandle, data []byte, offset int64) (uint32, syscall.Errno) {
	leave, failed := n.sys.enter()
	if failed {
		return 0, syscall.EIO
	}
	defer leave()
	if errno := n.sys.take(offset + int64(len(data)) - int64(len(n.obj.data))); errno != 0 {
		return 0, errno
	}
	n.obj.write(data, int(offset))
	n.obj.tx = n.sys.tx
	if h, ok := f.(*handle); ok && h.sync {
		n.sys.sync(n.obj)
	}
	return uint32(len(data)), 0 //nolint:gosec // at most maxWrite
}

// take takes bytes of what is left on the disk.
func (s *System) take(bytes int64) syscall.Errno {
	if s.room < 0 || bytes <= 0 {
		return 0
	}
	if bytes > s.room {
		return syscall.ENOSPC
	}
	s.room -= bytes
	return 0
}

// Fsync is for files and directories.
func (n *node) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	leave, failed := n.sys.enter()
	if failed {
		return syscall.EIO
	}
	defer leave()
	n.sys.sync(n.obj)
	return 0
}

func (n *node) Statfs(_ context.Context, out *fuse.StatfsOut) syscall.Errno {
	const size = 1 << 40 / page
	free := uint64(size)
	leave, failed := n.sys.enter()
	if failed {
		return syscall.EIO
	}
	defer leave()
	if n.sys.room >= 0 {
		free = uint64(n.sys.room) / page
	}
	out.Blocks, out.Bfree, out.Bavail = size, free, free
	out.Bsize, out.Frsize, out.NameLen = page, page, 255
	out.Files, out.Ffree = 1<<20, 1<<20
	return 0
}
